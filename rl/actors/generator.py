"""Generator: the vLLM engine loop as an actor, and the controller's handle to its mesh."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from monarch.actor import Actor, concurrent_endpoint, current_rank

from rl.actors.group import ActorGroup, Supervisor
from rl.generation.config import GeneratorConfig, environment
from rl.model.parts import Part
from rl.model.shape import ModelConfig
from rl.model.tp_plan import local_part
from rl.types import Completion, GenerationRequest
from rl.weights.digest import PartDigests, digests
from rl.weights.shared_memory import Segment, Subscriber

if TYPE_CHECKING:
    from rl.generation.engine import GenerationEngine


class Generator(Actor):
    """One tensor-parallel rank. ``generate`` and ``pull_weights`` go to rank 0, which leads the others."""

    def __init__(self, config: GeneratorConfig, model: ModelConfig, seed: int):
        self._config, self._model, self._seed = config, model, seed
        self._rank = current_rank().rank

    @concurrent_endpoint
    async def start(self) -> None:
        from rl.generation.engine import GenerationEngine
        from rl.generation.loop import EngineLoop

        def make_engine() -> GenerationEngine:
            return GenerationEngine(self._config, self._model, seed=self._seed)

        def pull(engine: GenerationEngine, version: int) -> None:
            self._subscriber.pull(version)

        self._loop = EngineLoop(make_engine, pull)
        await self._loop.start()

    @concurrent_endpoint
    async def serve(self) -> None:
        await self._loop.serve()

    @concurrent_endpoint
    async def connect(self, segments: list[Segment], first_reader: int) -> None:
        reader = first_reader + self._rank
        self._subscriber = await self._loop.run_between_steps(
            lambda engine: Subscriber(segments, self._parts(engine), reader=reader)
        )

    @concurrent_endpoint
    async def pull_weights(self, version: int) -> None:
        await self._loop.pull(version)

    @concurrent_endpoint
    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        return await self._loop.generate(requests)

    @concurrent_endpoint
    async def weight_digests(self) -> PartDigests:
        return await self._loop.run_between_steps(lambda engine: digests(self._parts(engine)))

    @concurrent_endpoint
    async def close(self) -> None:
        await self._loop.close()

    def _parts(self, engine: "GenerationEngine") -> list[Part]:
        tp, rank = self._config.tensor_parallel_degree, self._rank
        return [local_part(name, own, tp=tp, rank=rank) for name, own in engine.parameters().items()]


class GeneratorMesh:
    """What the controller and the rollouter see of a generator."""

    def __init__(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        supervisor: Supervisor,
        *,
        folder: Path,
        start_deadline: float,
        deadline: float,
    ):
        self._config, self._model = config, model
        self._start_deadline, self._deadline = start_deadline, deadline
        self._group = ActorGroup("generator", supervisor, logs=folder / "logs")
        self.ranks = config.tensor_parallel_degree
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.version: int | None = None
        """Policy version that it generates with; None before the first pull."""

    async def start(self, *, seed: int, first_device: int = 0) -> None:
        """Spawn the ranks and start their engines, without weights."""
        self._group.spawn(
            Generator,
            self.ranks,
            self._config,
            self._model,
            seed,
            env=environment(self._config),
            first_device=first_device,
        )
        await self._group.call("start", deadline=self._start_deadline)
        self._group.watch("serve")

    async def connect(self, segments: list[Segment], *, first_reader: int = 0) -> None:
        """Plan the routes out of the trainer's memory, as its readers ``first_reader`` and following."""
        await self._group.call("connect", segments, first_reader, deadline=self._deadline)

    async def pull_weights(self, version: int) -> None:
        """Generate with ``version``, which the trainer has pushed, from here on."""
        await self._group.call("pull_weights", version, rank=0, deadline=self._deadline)
        self.version = version

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Completions of ``requests``, in their order."""
        return (await self._group.call("generate", requests, rank=0, deadline=self._deadline))[0]

    async def weight_digests(self) -> list[PartDigests]:
        """Digests of every rank's parameters."""
        return await self._group.call("weight_digests", deadline=self._deadline)

    async def close(self) -> None:
        """Let vLLM clean up; the processes end."""
        await self._group.call("close", deadline=self._deadline)
        await self.stop()

    async def stop(self) -> None:
        """End the processes, whatever they are doing."""
        await self._group.stop()
