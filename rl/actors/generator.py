"""Generator: the vLLM engine loop as an actor, and the controller's handle to its mesh."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from monarch.actor import current_rank

from rl.actors.adapter_slots import AdapterSlots
from rl.actors.endpoint import T, endpoint, timed
from rl.actors.gathering import Answers, Gathered, Outcome
from rl.actors.group import Ranks
from rl.actors.mesh import Mesh, Rank, log, log_memory
from rl.generation.generator_config import BankConfig, GeneratorConfig, environment, shared_memory
from rl.host.platform import bind_to_device
from rl.metrics import Metrics
from rl.model.activations import Activations, joined
from rl.model.digest import ShardDigests, digests
from rl.model.parity import Parity
from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Shard
from rl.training.snapshots import read_snapshot
from rl.training.start_weights import StartWeights
from rl.types import Completion, GenerationRequest, GivenSequence, Part
from rl.weights.transport import Subscriber, Transfer, open_subscriber

if TYPE_CHECKING:
    from rl.generation.engine import GenerationEngine
    from rl.generation.loop import Pulled

_Asked = tuple[list[GenerationRequest], bool]
"""Requests of a call, and whether it is ``fresh``."""


@dataclass(eq=False)
class Generator(Rank):
    """One tensor-parallel rank.

    ``generate`` and ``pull_weights`` are called on rank 0, which leads the others.
    """

    config: GeneratorConfig
    model: ModelConfig
    options: dict[str, Any]
    """Further arguments of the engine."""

    def __post_init__(self) -> None:
        self._rank = current_rank().rank
        self._subscriber: Subscriber | None = None

    @endpoint
    async def start(self) -> None:
        from rl.generation.engine import GenerationEngine
        from rl.generation.loop import EngineLoop

        def make_engine() -> GenerationEngine:
            bind_to_device()
            return GenerationEngine(self.config, self.model, **self.options)

        self._loop = EngineLoop(make_engine, self._pull)
        self._answers = Answers(self._begin, self._loop.require_running)
        await self._loop.start()
        here = sum(shard.box.numel for shard in await self._shards())
        degree = self.config.tensor_parallel_degree
        log_memory(
            f"rank {self._rank} of {degree}; {here:,} parameters of {self.config.dtype}; "
            f"CPU threads: {torch.get_num_threads()}"
        )

    @endpoint
    async def connect(
        self, transfer: Transfer | StartWeights, addresses: list[Any], generator: int
    ) -> None:
        if self._rank == 0:
            await self._loop.abort()
        shards = await self._loop.run_between_steps(self._disconnected)
        if isinstance(transfer, StartWeights):
            self._subscriber = transfer.subscriber(shards)
            log(f"loads the {transfer.describe()}")
            return
        self._subscriber = open_subscriber(
            transfer, addresses, shards, generator=generator, rank=self._rank
        )
        log(f"reads weights over {transfer.transport} as generator {generator}")

    @endpoint
    async def fetch_weights(self, version: int) -> None:
        begin = time.time()
        assert self._subscriber is not None, "connect comes first"
        await self._subscriber.fetch(version)
        return timed(None, [*self._loop.take_work(), ("fetch", begin, time.time())])

    @endpoint
    async def generate(
        self, calls: Sequence[tuple[int, _Asked]]
    ) -> tuple[list[Outcome[list[Completion]]], Metrics]:
        return await self._answers.of(calls), self._loop.take_load()

    @endpoint
    async def idle_s(self) -> float:
        return self._loop.idle_s

    @endpoint
    async def figures(self) -> dict[str, float]:
        return await self._loop.figures()

    @endpoint
    async def abort(self, *request_ids: str) -> None:
        await self._loop.abort(*request_ids)
        # All ranks have executed a command of one turn of the loop before the second turn after it.
        for _ in range(2):
            await self._loop.run_between_steps(lambda engine: None)

    @endpoint
    async def serve(self) -> None:
        await self._loop.serve()

    @endpoint
    async def pull_weights(self, version: int) -> "Pulled":
        return await self._loop.pull(version)

    @endpoint
    async def load_adapter(self, number: int, place: int, folder: Path) -> None:
        factors = await asyncio.to_thread(read_snapshot, folder)
        await self._loop.run_between_steps(
            lambda engine: engine.load_adapter(number, place, factors)
        )

    @endpoint
    async def activations(self, sequence: GivenSequence) -> None:
        await self._loop.activations(sequence)

    @endpoint
    async def take_activations(self) -> Activations | None:
        return await self._loop.take_activations()

    @endpoint
    async def offload(self) -> None:
        await self._loop.run_between_steps(lambda engine: engine.offload())

    @endpoint
    async def onload(self) -> None:
        await self._loop.run_between_steps(lambda engine: engine.onload())

    @endpoint
    async def weight_digests(self) -> ShardDigests:
        return await self._loop.run_between_steps(lambda engine: digests(engine.parameters()))

    @endpoint
    async def close(self) -> None:
        await self._loop.close()

    async def _in_engine(self, call: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_between_steps(lambda _: call(*args))

    def _begin(
        self, asked: _Asked, on_tokens: Callable[[Part], object]
    ) -> "Future[list[Completion]]":
        requests, fresh = asked
        return self._loop.begin(requests, fresh=fresh, on_tokens=on_tokens)

    async def _shards(self) -> Sequence[Shard]:
        return await self._loop.run_between_steps(lambda engine: engine.parameters())

    def _disconnected(self, engine: "GenerationEngine") -> list[Shard]:
        """Close the subscriber, between steps so that no pull uses it; return the parameters."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
        engine.version = None  # the versions of a trainer that was restarted may be lower
        return engine.parameters()

    def _pull(self, _: "GenerationEngine", version: int) -> int:
        assert self._subscriber is not None, "connect comes first"
        return self._subscriber.pull(version)


@dataclass(kw_only=True, eq=False)
class GeneratorMesh(Mesh):
    """A generator, as the controller and the rollouter see it."""

    actor = Generator
    config: GeneratorConfig
    model: ModelConfig
    seed: int
    number: int
    """Number in the run, from 0; publishers of a network reserve its place."""
    in_turns: bool = False
    """Whether other models use its devices at times."""
    parity: Parity = "close"
    adapters: BankConfig | None = None
    """Adapters that it can hold beside its weights."""
    version: int | None = field(default=None, init=False)
    """Policy version of its weights; None before the first pull."""
    state: Literal["absent", "joining", "serving", "leaving"] = field(default="absent", init=False)
    """``joining`` while a push brings it weights, ``serving`` while it also gets requests, and
    ``leaving`` until its last request and its processes have ended."""
    load: int = field(default=0, init=False)
    """Number of its requests in flight."""
    fetches: int | None = field(default=None, init=False)
    """Version that it is fetching, which a publish must not overwrite; None without a fetch."""
    turn: int = field(default=0, init=False)
    """Grows each time that the router chooses it; no two generators have the same."""
    has_answered: bool = field(default=False, init=False)
    """Whether it has returned completions since its last loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dtype: torch.dtype = getattr(torch, self.config.dtype)
        self._has_prefixes = False
        self._is_empty = False  # its weights were dropped
        self._load = Metrics({})
        self._transfer_s = 0.0
        self._calls = Gathered(self._exchange)

    @property
    def is_serving(self) -> bool:
        """Whether it gets requests. A lost generator gets none, whatever saw its death."""
        return self.state == "serving" and self.is_running

    def _arguments(self) -> tuple[Any, ...]:
        options = {
            "seed": self.seed,
            "timeout_s": self.collective_timeout_s,
            "in_turns": self.in_turns,
            "parity": self.parity,
            "adapters": self.adapters,
        }
        return self.config, self.model, options

    def _environment(self) -> dict[str, str]:
        return environment(self.config)

    async def start(self) -> None:
        """Spawn the ranks and start their engines, without weights."""
        self.version = None
        self._is_empty = False
        self._calls = Gathered(self._exchange)  # calls of processes before still fail with theirs
        count = self.adapters.count if self.adapters is not None else 0
        self._slots = AdapterSlots(
            count, lambda *adapter: self.call(Generator.load_adapter, *adapter)
        )
        await super().start()
        self._group.watch(Generator.serve)

    async def connect(self, transfer: Transfer | StartWeights, addresses: list[Any]) -> None:
        """Plan the routes from the trainer's ranks, or read weights without a trainer.

        Resets ``version`` and aborts requests in flight.
        """
        await self.call(Generator.connect, transfer, addresses, self.number)
        self._transfer_s = transfer.timeout_s
        self.version = None
        self._is_empty = False

    async def fetch_weights(self, version: int) -> None:
        """Fetch ``version``, which the trainer has pushed. After an ActorFailure caused by
        VersionGone or TransferFailed the generator still has the weights it had.
        """
        # A rank may first have to end a fetch that failed on another.
        await self.on(extra_s=2 * self._transfer_s).call(Generator.fetch_weights, version)

    async def pull_weights(self, version: int) -> float:
        """Load ``version``, which was fetched, or a newer version if one arrives first. Return the
        pause of generation, in s.
        """
        leader = self._leader(2 * self._transfer_s)
        (pulled,) = await leader.call(Generator.pull_weights, version)
        self._has_prefixes = self._has_prefixes and pulled.version == self.version
        self.version = pulled.version
        self._is_empty = False
        return pulled.pause_s

    async def generate(
        self,
        requests: list[GenerationRequest],
        *,
        fresh: bool = False,
        adapter: Path | None = None,
        on_tokens: Callable[[Part], None] | None = None,
    ) -> list[Completion]:
        """Return completions in the order of ``requests``.

        ``fresh``: do not use cached prefixes of earlier requests. ``adapter``: sample with the
        snapshot in this folder beside the weights, which needs ``adapters``. ``on_tokens`` is
        called with tokens as they are sampled.
        """
        if on_tokens is not None:
            requests = [replace(request, streams=True) for request in requests]
        async with self._slots.of(adapter) as number:
            if number:
                requests = [replace(request, adapter=number) for request in requests]
            fresh = fresh and self._has_prefixes
            self._has_prefixes = True
            return await self._calls.make((requests, fresh), on_tokens)

    async def _exchange(
        self, calls: Sequence[tuple[int, _Asked]]
    ) -> list[Outcome[list[Completion]]]:
        ((outcomes, load),) = await self._leader().call(Generator.generate, calls)
        self._load = Metrics.merged([self._load, load])
        return [
            outcome._replace(answer=self._group.raised(0, "generate", outcome.answer))
            if isinstance(outcome.answer, Exception)
            else outcome
            for outcome in outcomes
        ]

    async def activations(self, sequence: GivenSequence) -> Activations:
        """Return activations along the tokens of ``sequence``, which are computed as if they were
        sampled.
        """
        await self._leader().call(Generator.activations, sequence)
        self._has_prefixes = True
        answers = await self.call(Generator.take_activations)
        return joined([answer for answer in answers if answer is not None], shape_of(self.model))

    def _leader(self, extra_s: float = 0.0) -> Ranks:
        """Return rank 0, which leads, to be called. The call may last while tokens are sampled:
        answers can be long, and requests and pulls wait for those of others.
        """
        return replace(self.on(0, extra_s=extra_s), idle=Generator.idle_s)

    async def weight_digests(self) -> list[ShardDigests]:
        """Return digests of every rank's parameters."""
        return await self.call(Generator.weight_digests)

    async def figures(self) -> dict[str, float]:
        """Return what the engine does now, ``running``, ``queue`` and ``cache``, and what it did
        since its start: :data:`rl.generation.requests.COUNTS`.
        """
        (figures,) = await self.on(0).call(Generator.figures)
        return figures

    def take_load(self) -> Metrics:
        """Return ``generator/running``, ``queue`` (waiting requests) and ``cache`` (share of the KV
        cache in use), each as ``_mean`` and ``_max`` over the engine's steps since the last call,
        and ``preemptions`` and ``prefix_hits`` (share of the tokens of prompts) in these steps.
        """
        load = self._load
        self._load = Metrics({})
        return load

    async def abort(self, *request_ids: str) -> None:
        """Abort these requests, or without ids all in flight, also those of cancelled callers."""
        await self.on(0).call(Generator.abort, *request_ids)

    async def offload(self) -> None:
        """Abort requests in flight, and drop the weights and all keys and values."""
        await self.abort()
        await self.call(Generator.offload)
        self._is_empty = self.version is not None

    async def onload(self, *, model: bool = True) -> None:
        """Take the memory back. With ``model``, load the weights of ``version`` again, which the
        push still has, unless others were pulled meanwhile.
        """
        await self.call(Generator.onload)
        if model and self._is_empty and self.version is not None:
            await self.pull_weights(self.version)

    async def stop(self) -> None:
        """End the processes, whatever they are doing. Raises nothing."""
        await super().stop()
        for path in shared_memory(self._group.port):
            path.unlink(missing_ok=True)
