"""A model with a role as an actor."""

import asyncio
import gc
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple

import torch
import torch.distributed as dist
from torchtitan.config import Configurable

from rl.actors.endpoint import Endpoint, P, R, T, endpoint, timed
from rl.actors.mesh import Rank, log_memory
from rl.host.platform import (
    bind_to_device,
    peak_memory,
    resident_memory,
)
from rl.metrics import Metrics, Value
from rl.model.activations import Activations, Recorder
from rl.model.digest import ShardDigests, digests
from rl.model.parity import Parity
from rl.model.shape import ModelConfig
from rl.model.shards import Shard, Shards
from rl.model.updates import Update
from rl.training.trainer_config import AdapterConfig, Source, TrainerConfig, short_layout
from rl.types import Batch, Head

Outputs = dict[str, torch.Tensor]
"""Per-token values by name, float32 [T]; ``logprobs`` has the shape of the batch's targets."""


def engine_endpoint(
    *, changes: bool = False
) -> Callable[[Callable[Concatenate[Any, P], R]], Endpoint[P, R]]:
    """Make a method an endpoint that runs in the engine's thread and answers with its time.

    ``changes``: whether the method changes or moves the weights that are pushed.
    """

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Endpoint[P, R]:
        @wraps(method)
        async def call(self: "ModelWorker", *args: P.args, **kwargs: P.kwargs) -> R:
            def run() -> R:
                began = time.time()
                answer = method(self, *args, **kwargs)
                return timed(answer, [(method.__name__, began, time.time())])

            return await self._in_engine(run, changes=changes)

        return endpoint(call)

    return decorate


class _Stepped(NamedTuple):
    version: int
    metrics: Metrics
    """Metrics that all ranks share."""
    own: Metrics
    """Metrics of this rank."""
    gradient: ShardDigests
    weights: ShardDigests


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """Arguments of a rank's :class:`rl.training.engine.TrainingEngine`."""

    config: TrainerConfig
    model: ModelConfig
    head: Head
    seed: int
    steps: int
    """Number of optimizer steps in all."""
    folder: str
    """Folder of the run or session."""
    parity: Parity = "close"


@dataclass(eq=False)
class ModelWorker(Rank):
    """One rank of a model that has a role in the run. The engine runs in a thread of its own, so
    that the actor receives calls meanwhile.

    - Calls to the engine run one after another, in the order in which they arrived.
    - Calls that change or move the weights wait for readers of the weights, and readers wait for
      them.
    """

    arguments: EngineArguments

    def __post_init__(self) -> None:
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._steps = 0
        # Both locks are fair: first come, first served.
        self._turn = asyncio.Lock()
        self._weights = asyncio.Lock()

    async def _in_engine(self, call: Callable[..., T], *args: Any, changes: bool = False) -> T:
        """Call a function in the engine's thread; ``changes`` as for ``engine_endpoint``."""
        async with self._turn, self._weights if changes else nullcontext():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._engine_thread, call, *args)

    async def _shards(self) -> Sequence[Shard]:
        return [*(await self._in_engine(self.engine.shards)).values()]

    @engine_endpoint()
    def start(self) -> None:
        from rl.training.checkpoint import Checkpointer
        from rl.training.engine import TrainingEngine

        arguments = self.arguments
        bind_to_device()
        self.engine = TrainingEngine(**vars(arguments), loads=True)
        self.checkpointer = Checkpointer(self.engine, arguments.model, folder=arguments.folder)
        shards = self.engine.shards().values()
        whole = sum(math.prod(shard.shape) for shard in shards)
        here = sum(shard.box.numel for shard in shards)
        log_memory(
            f"rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"{short_layout(arguments.config.parallelism)}; {whole:,} "
            f"parameters, of which {here:,} are here; CPU threads: {torch.get_num_threads()}, "
            f"products: {self.engine.matmul}"
        )

    @engine_endpoint()
    def forward(self, batch: Batch | None, temperature: float, source: Source) -> Outputs | None:
        with self.engine.adapters.active_adapter(source):
            batch = self.engine.from_leader(batch)
            outputs = self.engine.forward(batch, temperature=temperature)
        return outputs if self.engine.is_leader else None

    @engine_endpoint()
    def activations(
        self, batch: Batch | None, positions: Sequence[int], temperature: float
    ) -> Activations:
        with self.engine.adapters.active_adapter(None):
            batch = self.engine.from_leader(batch)
            with Recorder(self.engine.model, positions) as recorder:
                outputs = self.engine.forward(batch, temperature=temperature)
        return replace(recorder.activations, logprobs=outputs["logprobs"])

    @engine_endpoint()
    def forward_backward(
        self,
        batch: Batch | None,
        loss: Configurable.Config,
        temperature: float,
        weight: float,
        adapter: str | None,
    ) -> tuple[Outputs, Metrics] | None:
        self.engine.adapters.use(adapter)
        batch = self.engine.from_leader(batch)
        answer = self.engine.forward_backward(
            batch, loss.build(), temperature=temperature, weight=weight
        )
        return answer if self.engine.is_leader else None

    @engine_endpoint(changes=True)
    def optim_step(
        self, options: dict[str, Any], with_digests: bool, adapter: str | None
    ) -> _Stepped:
        self.engine.adapters.use(adapter)
        gradient: ShardDigests = {}
        weights: ShardDigests = {}

        def keep(shards: Shards) -> None:
            gradient.update(digests(shards.values()))

        self.checkpointer.wait_for_staging()
        metrics = self.engine.optim_step(**options, on_gradient=keep if with_digests else None)
        if with_digests:
            weights = digests(self.engine.trained_shards().values())
        gc.disable()  # one rank that collects stops all, so all collect after the same steps
        self._steps += 1  # versions are those of an adapter
        if self._steps % self.arguments.config.training.gc_freq == 0:
            gc.collect()
        operations = self.engine.work.take() if self.engine.is_leader else 0
        memory = {
            "memory/peak": Value(peak_memory() / 2**30, "max"),
            "memory/resident": Value(resident_memory() / 2**30, "max"),
            "trainer/tflop": Value(operations / 1e12, "sum"),
        }
        return _Stepped(self.engine.version, metrics, Metrics(memory), gradient, weights)

    @engine_endpoint(changes=True)
    def offload(self) -> None:
        self.checkpointer.wait_for_staging()  # a save reads the storages that are emptied
        self.engine.offload()

    @engine_endpoint()
    def onload(self, model: bool, optimizer: bool) -> None:
        self.engine.onload(model, optimizer)

    @engine_endpoint(changes=True)
    def export_hf(self, folder: str, adapter: str | None, dtype: str) -> Update:
        adapters = self.engine.adapters
        try:
            adapters.merge(adapter)
            with adapters.active_adapter(adapter):
                return self.checkpointer.export_hf(folder, dtype)
        finally:
            adapters.merge(None)

    @engine_endpoint(changes=True)
    def merge(self, source: Source) -> None:
        self.engine.adapters.merge(source)

    @engine_endpoint(changes=True)
    def weight_digests(self, dtype: torch.dtype | None, source: Source) -> ShardDigests:
        self.engine.adapters.merge(source)
        return digests(self.engine.shards().values(), dtype=dtype)

    @engine_endpoint()
    def trained_digests(self, adapter: str | None) -> ShardDigests:
        with self.engine.adapters.active_adapter(adapter):
            return digests(self.engine.trained_shards().values())

    @engine_endpoint()
    def save_weights(self, folder: Path) -> None:
        with self.engine.adapters.active_adapter(None):
            self.checkpointer.save_weights(folder)

    @engine_endpoint(changes=True)
    def load_weights(self, folder: Path, version: int | None) -> None:
        self.engine.adapters.use(None)
        self.checkpointer.load_weights(folder, version)

    @engine_endpoint()
    def save_snapshot(self, folder: Path, adapter: str | None) -> None:
        with self.engine.adapters.active_adapter(adapter):
            self.checkpointer.save_snapshot(folder)

    @engine_endpoint()
    def save_state(self, folder: Path, adapter: str | None) -> None:
        self.engine.adapters.use(adapter)
        self.checkpointer.save_state(folder)

    @engine_endpoint(changes=True)
    def load_state(self, folder: Path, optimizer: bool, adapter: str | None) -> int:
        self.engine.adapters.use(adapter)
        return self.checkpointer.load_state(folder, optimizer)

    @engine_endpoint()
    def reset_optimizer(self, adapter: str | None) -> None:
        self.engine.adapters.use(adapter)
        self.engine.reset_optimizer()

    @engine_endpoint()
    def create_adapter(self, name: str, config: AdapterConfig) -> None:
        self.engine.adapters.create(name, config)

    @engine_endpoint()
    def drop_adapter(self, name: str) -> None:
        self.engine.adapters.use(None)
        self.engine.adapters.drop(name)

    @engine_endpoint()
    def save_checkpoint(self, step: int, run_state: dict[str, Any]) -> None:
        self.engine.adapters.use(None)
        began = time.monotonic()
        self.checkpointer.save(step, run_state)
        log_memory(f"saved checkpoint {step} in {time.monotonic() - began:.2f} s")

    @engine_endpoint(changes=True)
    def load_checkpoint(self, step: int) -> tuple[int, dict[str, Any], Path | None, list[str]]:
        self.engine.adapters.use(None)
        run_state = self.checkpointer.load(step)
        loaded = self.checkpointer.loaded
        version = self.engine.version
        log_memory(f"weights of {loaded or 'the start of the run'}, policy version {version}")
        return version, run_state, loaded, self.checkpointer.ignored

    @endpoint
    async def close(self) -> None:
        await self._in_engine(self.checkpointer.close)
        await self._in_engine(self.engine.close)
