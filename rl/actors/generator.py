"""Generator: the vLLM engine loop as an actor, and the controller's handle to its mesh."""

from typing import TYPE_CHECKING, Any

import torch
from monarch.actor import Actor, concurrent_endpoint, current_rank

from rl.actors.group import ActorGroup, Deadlines, Mesh, outlasting
from rl.actors.supervisor import Supervisor
from rl.errors import RunError
from rl.generation.config import GeneratorConfig, environment, shared_memory
from rl.model.shape import ModelConfig
from rl.model.shards import Layout, Shard, layout_of
from rl.platform import memory_domain
from rl.types import Completion, GenerationRequest, Place
from rl.weights.digest import ShardDigests, digests
from rl.weights.open import open_subscriber
from rl.weights.transport import Subscriber, Transfer

if TYPE_CHECKING:
    from rl.generation.engine import GenerationEngine
    from rl.generation.loop import Pulled


class Generator(Actor):
    """One tensor-parallel rank.

    ``generate`` and ``pull_weights`` go to rank 0, which leads the others.
    """

    def __init__(self, config: GeneratorConfig, model: ModelConfig, seed: int, timeout_s: float):
        self._config = config
        self._model = model
        self._seed = seed
        self._timeout_s = timeout_s
        self._rank = current_rank().rank
        self._subscriber: Subscriber | None = None

    @concurrent_endpoint
    async def start(self) -> None:
        from rl.generation.engine import GenerationEngine
        from rl.generation.loop import EngineLoop

        def make_engine() -> GenerationEngine:
            return GenerationEngine(
                self._config, self._model, seed=self._seed, timeout_s=self._timeout_s
            )

        def pull(engine: GenerationEngine, version: int) -> int:
            return self._connected().pull(version)

        self._loop = EngineLoop(make_engine, pull)
        await self._loop.start()

    @concurrent_endpoint
    async def serve(self) -> None:
        await self._loop.serve()

    @concurrent_endpoint
    async def layout(self) -> tuple[str, Layout]:
        return memory_domain(), layout_of(
            await self._loop.run_between_steps(lambda engine: engine.parameters())
        )

    @concurrent_endpoint
    async def connect(self, transfer: Transfer, addresses: list[Any], generator: int) -> None:
        if self._rank == 0:
            await self._loop.abort()
        shards = await self._loop.run_between_steps(self._disconnected)
        self._subscriber = open_subscriber(
            transfer, addresses, shards, generator=generator, rank=self._rank
        )

    @concurrent_endpoint
    async def fetch_weights(self, version: int) -> None:
        await self._connected().fetch(version)

    @concurrent_endpoint
    async def pull_weights(self, version: int) -> "Pulled":
        return await self._loop.pull(version)

    @concurrent_endpoint
    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        return await self._loop.generate(requests)

    @concurrent_endpoint
    async def reset_prefix_cache(self) -> None:
        await self._loop.reset_prefix_cache()

    @concurrent_endpoint
    async def abort(self) -> None:
        await self._loop.abort()
        for _ in range(
            2
        ):  # what one turn of the loop is told, all ranks have done before the turn after the next
            await self._loop.run_between_steps(lambda engine: None)

    @concurrent_endpoint
    async def offload(self) -> None:
        await self._loop.run_between_steps(lambda engine: engine.offload())

    @concurrent_endpoint
    async def onload(self) -> None:
        await self._loop.run_between_steps(lambda engine: engine.onload())

    @concurrent_endpoint
    async def weight_digests(self) -> ShardDigests:
        return await self._loop.run_between_steps(lambda engine: digests(engine.parameters()))

    @concurrent_endpoint
    async def close(self) -> None:
        await self._loop.close()

    def _disconnected(self, engine: "GenerationEngine") -> list[Shard]:
        if self._subscriber is not None:  # between steps, so that no pull uses it
            self._subscriber.close()
            self._subscriber = None
        engine.version = None  # the versions of a trainer that was restarted may be lower
        return engine.parameters()

    def _connected(self) -> Subscriber:
        if self._subscriber is None:
            raise RunError(
                "this generator is not connected to a trainer: connect before pull_weights"
            )
        return self._subscriber


class GeneratorMesh(Mesh):
    """What the controller and the rollouter see of a generator."""

    def __init__(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        supervisor: Supervisor,
        *,
        name: str,
        seed: int,
        deadlines: Deadlines,
        place: Place | None = None,
    ):
        self._config = config
        self._model = model
        self._supervisor = supervisor
        self._seed = seed
        self._deadlines = deadlines
        self.name = name
        self._place = place or Place(ranks=config.tensor_parallel_degree)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._group = self._new_group()
        self._started = False
        self._has_prefixes = False
        self._patience = 0.0
        self.version: int | None = None
        """Policy version that it generates with; None before the first pull."""

    def _new_group(self) -> ActorGroup:
        return ActorGroup(self.name, self._supervisor, heartbeat=self._deadlines.heartbeat)

    async def start(self) -> None:
        """Spawn the ranks and start their engines, without weights; again after ``stop``."""
        self._group = self._new_group()
        self._started = False
        self.version = None
        await self._group.spawn(
            Generator,
            self._place,
            self._config,
            self._model,
            self._seed,
            outlasting(self._deadlines),
            deadline=self._deadlines.start,
            env=environment(self._config),
        )
        await self._group.call("start", deadline=self._deadlines.start)
        self._group.watch("serve")
        self._started = True

    async def layouts(self) -> list[tuple[str, Layout]]:
        """Each rank's memory domain, and what it holds of the parameters."""
        return await self._group.call("layout", deadline=self._deadlines.call)

    async def connect(
        self, transfer: Transfer, addresses: list[Any], *, generator: int = 0
    ) -> None:
        """Plan the routes from the trainer's ranks, as generator number ``generator`` of the run.

        It forgets its version, and what is in flight is aborted.
        """
        await self._group.call(
            "connect", transfer, addresses, generator, deadline=self._deadlines.call
        )
        self._patience = transfer.patience
        self.version = None

    async def pull_weights(self, version: int) -> float:
        """Generate with ``version``, which the trainer has pushed, from here on; or a newer one, if
        that came first.

        Returns the seconds that generation stood still for it. An ActorFailure whose cause is
        VersionGone or TransferFailed leaves the generator as it is.
        """
        deadline = (
            self._deadlines.call + 2 * self._patience
        )  # a rank may have a fetch to end that failed on another
        await self._group.call("fetch_weights", version, deadline=deadline)
        pulled = (await self._group.call("pull_weights", version, rank=0, deadline=deadline))[0]
        self._has_prefixes = self._has_prefixes and pulled.version == self.version
        self.version = pulled.version
        return pulled.pause_s

    async def generate(
        self, requests: list[GenerationRequest], *, fresh: bool = False
    ) -> list[Completion]:
        """Completions of ``requests``, in their order; ``fresh``: without the cached prefixes of
        any before them.
        """
        if fresh and self._has_prefixes:
            await self._group.call("reset_prefix_cache", rank=0, deadline=self._deadlines.call)
        self._has_prefixes = True
        return (
            await self._group.call("generate", requests, rank=0, deadline=self._deadlines.call)
        )[0]

    async def weight_digests(self) -> list[ShardDigests]:
        """Digests of every rank's parameters."""
        return await self._group.call("weight_digests", deadline=self._deadlines.call)

    async def abort(self) -> None:
        """Abort the requests in flight, also those whose caller was cancelled and no longer
        waits.
        """
        await self._group.call("abort", rank=0, deadline=self._deadlines.call)

    async def offload(self) -> None:
        """Move the weights to host memory and forget all keys and values; what is in flight is
        aborted.
        """
        await self.abort()
        await self._group.call("offload", deadline=self._deadlines.call)

    async def onload(self) -> None:
        """Bring the weights back, bit for bit."""
        await self._group.call("onload", deadline=self._deadlines.call)

    async def close(self) -> None:
        """Let vLLM clean up; the processes end."""
        await self._group.call("close", deadline=self._deadlines.call)
        await self.stop()

    async def stop(self) -> None:
        """End the processes, whatever they are doing. Raises nothing."""
        await self._group.stop()
        for path in shared_memory(self._group.port):
            path.unlink(missing_ok=True)
