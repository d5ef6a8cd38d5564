"""A model with a role as an actor, and the controller's handle to its mesh."""

import asyncio
import gc
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from monarch.actor import Actor, concurrent_endpoint
from torchtitan.config import Configurable

from rl.actors.group import Timed
from rl.actors.mesh import Mesh, log_memory
from rl.host import profiler
from rl.host.platform import (
    allocator_variables,
    bind_to_device,
    peak_memory,
    resident_memory,
    thread_variables,
)
from rl.metrics import Metrics, Value
from rl.model.activations import Activations, Recorder, joined
from rl.model.digest import ShardDigests, digests, merge_digests
from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Shards
from rl.training.trainer_config import Source, TrainerConfig, short_layout
from rl.types import Batch, Head

T = TypeVar("T")

Outputs = dict[str, torch.Tensor]
"""Per-token values by name, float32 [T]; ``logprobs`` has the shape of the batch's targets."""


_Adapter = Literal["used", "worn", "any"]


def _endpoint(
    method: str, *, changes: bool = False, adapter: _Adapter = "any", named: bool = False
) -> Any:
    """Return an endpoint that calls ``method`` in the engine's thread, and answers with its time.

    - ``changes``: whether the method changes or moves the weights that are pushed.
    - ``adapter``: whether the policy's own adapter is put into the model before the call ("used"),
      or only its weights during the call ("worn").
    - ``named``: whether the last argument names another adapter, or other weights, for that.
    """
    name = method.rpartition(".")[2].removeprefix("_")

    async def call(self: "ModelWorker", *args: Any) -> Any:
        def timed() -> Timed:
            began = time.time()
            *given, source = args if named else (*args, None)
            with self._having(source, adapter):
                answer = attrgetter(method)(self)(*given)
            return Timed(answer, [(name, began, time.time())])

        return await self._in_engine(timed, changes=changes)

    return concurrent_endpoint(call)


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


@dataclass(eq=False)
class ModelWorker(Actor):
    """One rank of a model that has a role in the run. The engine runs in a thread of its own, so
    that the actor receives calls meanwhile.

    - Calls to the engine run one after another, in the order in which they arrived.
    - Calls that change or move the weights wait for readers of the weights, and readers wait for
      them.
    - ``start`` builds the engine, so that a failure is an error with a traceback.
    """

    arguments: EngineArguments

    def __post_init__(self) -> None:
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        # Both locks are fair: first come, first served.
        self._turn = asyncio.Lock()
        self._weights = asyncio.Lock()

    start = _endpoint("_start")
    forward = _endpoint("_forward", adapter="worn", named=True)
    activations = _endpoint("_activations", adapter="worn")
    forward_backward = _endpoint("_forward_backward", adapter="used", named=True)
    optim_step = _endpoint("_optim_step", changes=True, adapter="used", named=True)
    offload = _endpoint("_offload", changes=True)
    onload = _endpoint("engine.onload")
    weight_digests = _endpoint("_weight_digests", changes=True)
    trained_digests = _endpoint("_trained_digests", adapter="worn", named=True)
    save_checkpoint = _endpoint("_save_checkpoint", adapter="used")
    load_checkpoint = _endpoint("_load_checkpoint", changes=True, adapter="used")
    save_weights = _endpoint("checkpointer.save_weights", adapter="worn")
    load_weights = _endpoint("checkpointer.load_weights", changes=True, adapter="used")
    save_snapshot = _endpoint("checkpointer.save_snapshot", adapter="worn", named=True)
    save_state = _endpoint("checkpointer.save_state", adapter="used", named=True)
    load_state = _endpoint("checkpointer.load_state", changes=True, adapter="used", named=True)
    reset_optimizer = _endpoint("engine.reset_optimizer", adapter="used", named=True)
    create_adapter = _endpoint("engine.adapters.create")
    drop_adapter = _endpoint("engine.adapters.drop", adapter="used")
    merge = _endpoint("engine.adapters.merge", changes=True)
    export_hf = _endpoint("_export_hf", changes=True)
    begin_profile = _endpoint("_begin_profile")
    end_profile = _endpoint("_end_profile")
    close = _endpoint("_close")

    _begin_profile = staticmethod(profiler.begin_profile)
    _end_profile = staticmethod(profiler.end_profile)

    def _having(self, source: Source, adapter: str) -> AbstractContextManager[None]:
        """Put an adapter into the model, or its weights while the block runs: see ``_endpoint``."""
        if adapter == "used":
            self.engine.adapters.use(source)
        return self.engine.adapters.active_adapter(source) if adapter == "worn" else nullcontext()

    def _start(self) -> None:
        from rl.training.checkpoint import Checkpointer
        from rl.training.engine import TrainingEngine

        given = self.arguments
        bind_to_device()
        self.engine = TrainingEngine(**vars(given), loads=True)
        self.checkpointer = Checkpointer(self.engine, given.model, folder=given.folder)
        shards = self.engine.shards().values()
        whole = sum(math.prod(shard.shape) for shard in shards)
        here = sum(shard.box.numel for shard in shards)
        log_memory(
            f"rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"{short_layout(given.config.parallelism)}; {whole:,} "
            f"parameters, of which {here:,} are here; CPU threads: {torch.get_num_threads()}, "
            f"products: {self.engine.matmul}"
        )

    def _forward(self, batch: Batch | None, temperature: float) -> Outputs | None:
        batch = self.engine.from_leader(batch)
        outputs = self.engine.forward(batch, temperature=temperature)
        return outputs if self.engine.is_leader else None

    def _activations(
        self, batch: Batch | None, positions: Sequence[int], temperature: float
    ) -> Activations:
        batch = self.engine.from_leader(batch)
        with Recorder(self.engine.model, positions) as recorder:
            outputs = self.engine.forward(batch, temperature=temperature)
        return replace(recorder.activations, logprobs=outputs["logprobs"])

    def _forward_backward(
        self, batch: Batch | None, loss: Configurable.Config, temperature: float, weight: float
    ) -> tuple[Outputs, Metrics] | None:
        batch = self.engine.from_leader(batch)
        answer = self.engine.forward_backward(
            batch, loss.build(), temperature=temperature, weight=weight
        )
        return answer if self.engine.is_leader else None

    def _optim_step(self, options: dict[str, Any], with_digests: bool) -> "_Stepped":
        gradient: ShardDigests = {}
        weights: ShardDigests = {}

        def keep(shards: Shards) -> None:
            gradient.update(digests(shards.values()))

        self.checkpointer.wait_for_staging()
        metrics = self.engine.optim_step(**options, on_gradient=keep if with_digests else None)
        if with_digests:
            weights = self._trained_digests()
        self._collect_garbage()
        operations = self.engine.work.take() if self.engine.is_leader else 0
        own = {
            "memory/peak": Value(peak_memory() / 2**30, "max"),
            "memory/resident": Value(resident_memory() / 2**30, "max"),
            "trainer/tflop": Value(operations / 1e12, "sum"),
        }
        return _Stepped(self.engine.version, metrics, Metrics(own), gradient, weights)

    def _offload(self) -> None:
        self.checkpointer.wait_for_staging()  # a save reads the storages that are emptied
        self.engine.offload()

    def _collect_garbage(self) -> None:
        """Collect garbage on all ranks in the same steps: one rank that collects stops all."""
        gc.disable()
        if self.engine.version % self.arguments.config.training.gc_freq == 0:
            gc.collect()

    def _export_hf(self, folder: str, adapter: str | None = None) -> None:
        adapters = self.engine.adapters
        try:
            adapters.merge(adapter)
            with adapters.active_adapter(adapter):
                self.checkpointer.export_hf(folder)
        finally:
            adapters.merge(None)

    def _weight_digests(self, dtype: torch.dtype | None, source: Source = None) -> ShardDigests:
        self.engine.adapters.merge(source)
        return digests(self.engine.shards().values(), dtype=dtype)

    def _trained_digests(self) -> ShardDigests:
        return digests(self.engine.trained_shards().values())

    def _save_checkpoint(self, step: int, run_state: dict[str, Any]) -> None:
        began = time.monotonic()
        self.checkpointer.save(step, run_state)
        log_memory(f"saved checkpoint {step} in {time.monotonic() - began:.2f} s")

    def _load_checkpoint(self, step: int) -> tuple[int, dict[str, Any], Path | None, list[str]]:
        run_state = self.checkpointer.load(step)
        loaded = self.checkpointer.loaded
        version = self.engine.version
        log_memory(f"weights of {loaded or 'the start of the run'}, policy version {version}")
        return version, run_state, loaded, self.checkpointer.ignored

    def _close(self) -> None:
        self.checkpointer.close()
        self.engine.close()

    async def _in_engine(self, call: Callable[..., T], *args: Any, changes: bool = False) -> T:
        """Call a function in the engine's thread; ``changes`` as for ``_endpoint``."""
        async with self._turn, self._weights if changes else nullcontext():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._engine_thread, call, *args)


@dataclass(kw_only=True, eq=False)
class WorkerGroup(Mesh):
    """A model with a role, as the controller sees it.

    - Calls with a batch split it among the data-parallel ranks, send each part to the first rank of
      one, and merge the answers in the batch's order, whatever the number of sequences.
    - All other calls go to every rank with the same arguments.
    """

    actor = ModelWorker
    engine: EngineArguments
    version: int = field(default=0, init=False)
    """Number of optimizer steps that changed the weights; the policy version of a policy."""
    loads: int = field(default=0, init=False)
    """Number of times that weights were loaded, whatever their version."""
    loaded: Path | None = field(default=None, init=False)
    """Folder of the checkpoint that ``load_checkpoint`` loaded last; None without one."""
    step_digests: dict[str, dict[str, str]] = field(default_factory=dict, init=False)
    """Digests of the last step by parameter: ``gradient``, divided and clipped, and ``weights``
    after the step."""

    def _arguments(self) -> tuple[Any, ...]:
        config = self.engine.config
        timeout = max(config.comm.init_timeout_seconds, math.ceil(self.collective_timeout_s))
        config = replace(config, comm=replace(config.comm, init_timeout_seconds=timeout))
        return (replace(self.engine, config=config),)

    def _environment(self) -> dict[str, str]:
        return thread_variables(self.engine.config.threads) | allocator_variables()

    async def start(self) -> None:
        """Spawn the ranks and build their engines; can be called again after ``stop``."""
        self.version = 0
        await super().start()

    async def forward(
        self, batch: Batch, *, temperature: float = 1.0, source: Source = None
    ) -> Outputs:
        """Return ``logprobs`` and ``entropy`` of each token, or ``values`` of a critic, float32
        [T] in the batch's order, with the weights of ``source``.
        """
        return _merge(batch, await self._call_leaders("forward", batch, temperature, source))

    async def activations(
        self, batch: Batch, positions: Sequence[int], *, temperature: float = 1.0
    ) -> Activations:
        """Return activations of the one sequence of ``batch`` at ``positions``.

        Not for context parallelism, whose ranks have parts of a sequence.
        """
        shares, answers = await self._call_with("activations", batch, positions, temperature)
        per_share = len(answers) // len(shares)
        first = per_share * next(number for number, share in enumerate(shares) if share)
        return joined(answers[first : first + per_share], shape_of(self.engine.model))

    async def forward_backward(
        self,
        batch: Batch,
        loss: Configurable.Config,
        *,
        temperature: float = 1.0,
        weight: float = 1.0,
        adapter: str | None = None,
    ) -> tuple[Outputs, Metrics]:
        """Add the gradient of ``adapter``: that of ``loss`` on ``batch``, times ``weight``; return
        the outputs of ``forward``, and metrics.
        """
        given = (loss, temperature, weight, adapter)
        answers = await self._call_leaders("forward_backward", batch, *given)
        outputs = [(share, outputs) for share, (outputs, _) in answers]
        metrics = answers[0][1][1]
        return _merge(batch, outputs), metrics

    async def optim_step(
        self, *, with_digests: bool = False, adapter: str | None = None, **options: Any
    ) -> Metrics:
        """Take a step on the gradients of ``adapter``. A step of the policy that is not skipped
        adds 1 to ``version``. ``with_digests`` sets ``step_digests``.

        ``options`` are those of TrainingEngine.optim_step: denominator, lr, betas, eps,
        weight_decay, max_norm.
        """
        answers: list[_Stepped] = await self.call("optim_step", options, with_digests, adapter)
        self.version = answers[0].version if adapter is None else self.version
        if with_digests:
            self.step_digests = {
                "gradient": merge_digests(each.gradient for each in answers),
                "weights": merge_digests(each.weights for each in answers),
            }
        return answers[0].metrics | Metrics.merged(each.own for each in answers)

    async def offload(self) -> None:
        """Move parameters, gradients and optimizer state to host memory."""
        await self.call("offload")

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Bring back parameters, or gradients and optimizer state, bit for bit."""
        await self.call("onload", model, optimizer)

    async def load_checkpoint(self, step: int = -1) -> tuple[dict[str, Any], list[str]]:
        """Load checkpoint ``step``, or the newest if -1.

        Without one, or for step 0, load the weights that the config starts from. Returns the
        controller's state, and the names of incomplete checkpoints, which are ignored.
        """
        answers = await self.call("load_checkpoint", step)
        self.loads += 1
        self.version, run_state, self.loaded, ignored = answers[0]
        return run_state, ignored

    async def load_state(self, folder: Path, optimizer: bool, adapter: str | None) -> None:
        """Load the state that ``save_state`` wrote, of ``adapter`` or of the whole policy."""
        version, *_ = await self.call("load_state", folder, optimizer, adapter)
        self.version = version if adapter is None else self.version
        self.loads += 1

    async def load_weights(self, folder: Path, version: int | None = None) -> None:
        """Load what ``save_weights`` wrote, bit for bit, as those of ``version`` if given."""
        await self.call("load_weights", folder, version)
        self.loads += 1
        self.version = self.version if version is None else version

    async def _call_leaders(
        self, endpoint: str, batch: Batch, *args: Any
    ) -> list[tuple[list[int], Any]]:
        """Return the sequences and the answer of each data-parallel rank: see ``_call_with``."""
        shares, answers = await self._call_with(endpoint, batch, *args)
        return list(zip(shares, answers[:: len(answers) // len(shares)], strict=True))

    async def _call_with(
        self, endpoint: str, batch: Batch, *args: Any
    ) -> tuple[list[list[int]], list[Any]]:
        """Call every rank, sending each part of the batch once.

        Returns the sequences of each data-parallel rank, and the answers of all ranks.
        """
        shares = batch.shares(self.engine.config.dp_degree)
        per_share = self.ranks // len(shares)
        arguments: dict[int, Sequence[Any]] = dict.fromkeys(range(self.ranks), (None, *args))
        for number, share in enumerate(shares):
            arguments[number * per_share] = (batch.select(share), *args)
        deadline = self.deadlines.call
        return shares, await self._group.call_each(endpoint, arguments, deadline=deadline)


def _merge(batch: Batch, answers: list[tuple[list[int], Outputs]]) -> Outputs:
    """Return per-token values of the whole batch, from those of its shares."""
    shapes = {name: values.shape[1:] for name, values in answers[0][1].items()}
    merged = {name: torch.zeros(len(batch.tokens), *shape) for name, shape in shapes.items()}
    for share, outputs in answers:
        index = batch.token_index(share)
        for name, values in outputs.items():
            merged[name][index] = values
    return merged
