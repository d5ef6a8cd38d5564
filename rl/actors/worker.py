"""A model with a role as an actor, and the controller's handle to its mesh."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from monarch.actor import Actor, concurrent_endpoint
from torchtitan.config import Configurable

from rl.actors.group import ActorGroup, Deadlines, Mesh, outlasting
from rl.actors.supervisor import Supervisor
from rl.metrics import Metrics
from rl.model.shape import ModelConfig
from rl.training.config import TrainerConfig
from rl.training.micro_batches import balanced
from rl.types import Batch, Head, Place
from rl.weights.digest import ShardDigests, digests

T = TypeVar("T")

Outputs = dict[str, torch.Tensor]
"""Per-token values by name, float32 [T]."""


def _passed_on(method: str, *, changes: bool = False) -> Any:
    """Return an endpoint that calls ``method`` of the engine or the checkpointer.

    ``changes``: whether it changes or moves the weights.
    """

    async def call(self: "ModelWorker", *args: Any) -> Any:
        run = self._changing if changes else self._in_engine
        return await run(attrgetter(method)(self), *args)

    return concurrent_endpoint(call)


class ModelWorker(Actor):
    """One rank of a model that has a role in the run. The engine has a thread of its own, so that
    calls are heard.

    Calls to the engine run one after another, in the order they arrived. What changes or moves the
    weights first waits for whoever reads them, and these for what changes them. Engines are
    built by ``start``, so that a failing one is an error with a traceback.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: ModelConfig,
        head: Head,
        seed: int,
        steps: int,
        folder: str,
    ):
        self._config = config
        self._model = model
        self._head = head
        self._seed = seed
        self._steps = steps
        self._folder = folder
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        # fair: first come, first served
        self._turn = asyncio.Lock()
        self._weights = asyncio.Lock()

    @concurrent_endpoint
    async def start(self) -> None:
        await self._in_engine(self._build)

    def _build(self) -> None:
        from rl.training.checkpoint import Checkpointer
        from rl.training.engine import TrainingEngine

        self.engine = TrainingEngine(
            self._config,
            self._model,
            head=self._head,
            seed=self._seed,
            steps=self._steps,
            folder=self._folder,
        )
        self.checkpointer = Checkpointer(self.engine, self._model, folder=self._folder)

    @concurrent_endpoint
    async def forward(self, batch: Batch | None, temperature: float) -> Outputs | None:
        return await self._in_engine(
            lambda: self._of_leader(
                self.engine.forward(self.engine.from_leader(batch), temperature=temperature)
            )
        )

    @concurrent_endpoint
    async def forward_backward(
        self, batch: Batch | None, loss: Configurable.Config, temperature: float, weight: float
    ) -> tuple[Outputs, Metrics] | None:
        options = {"temperature": temperature, "weight": weight}
        return await self._in_engine(
            lambda: self._of_leader(
                self.engine.forward_backward(
                    self.engine.from_leader(batch), loss.build(), **options
                )
            )
        )

    @concurrent_endpoint
    async def optim_step(self, options: dict[str, Any]) -> tuple[int, Metrics]:
        return await self._changing(self._optim_step, options)

    def _optim_step(self, options: dict[str, Any]) -> tuple[int, Metrics]:
        self.checkpointer.wait_for_staging()
        metrics = self.engine.optim_step(**options)
        return self.engine.version, metrics

    offload = _passed_on("engine.offload", changes=True)
    onload = _passed_on("engine.onload")
    save_checkpoint = _passed_on("checkpointer.save")
    save_weights = _passed_on("checkpointer.save_weights")
    load_weights = _passed_on("checkpointer.load_weights", changes=True)
    export_hf = _passed_on("checkpointer.export_hf")

    @concurrent_endpoint
    async def weight_digests(self, dtype: torch.dtype | None) -> ShardDigests:
        return await self._in_engine(lambda: digests(self.engine.shards().values(), dtype=dtype))

    @concurrent_endpoint
    async def load_checkpoint(
        self, step: int
    ) -> tuple[int, dict[str, Any], Path | None, list[str]]:
        run_state = await self._changing(self.checkpointer.load, step)
        return self.engine.version, run_state, self.checkpointer.loaded, self.checkpointer.ignored

    @concurrent_endpoint
    async def close(self) -> None:
        await self._in_engine(self._close)

    def _close(self) -> None:
        self.checkpointer.close()
        self.engine.close()

    def _of_leader(self, answer: T) -> T | None:
        return answer if self.engine.is_leader else None

    async def _in_engine(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        async with self._turn:
            return await self._run(call, *args, **kwargs)

    async def _changing(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``_in_engine``, for what changes or moves the weights."""
        async with self._turn, self._weights:
            return await self._run(call, *args, **kwargs)

    async def _run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._engine_thread, partial(call, *args, **kwargs)
        )


class WorkerGroup(Mesh):
    """What the controller sees of a role's model: calls on whole batches, nothing of ranks.

    What takes a batch is dispatched by mesh: split among the data-parallel ranks, one part sent to
    the first rank of each, and the answers put together in the batch's order, whatever the count.
    All else is passed through: the same call to every rank.
    """

    actor: type[ModelWorker] = ModelWorker

    def __init__(
        self,
        config: TrainerConfig,
        model: ModelConfig,
        supervisor: Supervisor,
        *,
        name: str,
        head: Head = "logprobs",
        folder: Path,
        seed: int,
        steps: int,
        deadlines: Deadlines,
        place: Place | None = None,
    ):
        self._config = config
        self._model = model
        self._supervisor = supervisor
        self._place = place or Place(ranks=config.ranks)
        self._folder = folder
        self._seed = seed
        self._steps = steps
        self._deadlines = deadlines
        self.name = name
        self._head = head
        self._group = self._new_group()
        self._started = False
        self.version = 0
        """Optimizer steps that its weights have taken: of the policy, their version."""
        self.loaded: Path | None = None
        """Folder of the checkpoint whose state ``load_checkpoint`` returned last; None without
        one."""

    @property
    def ranks(self) -> int:
        """Processes of the group."""
        return self._config.ranks

    def _new_group(self) -> ActorGroup:
        return ActorGroup(self.name, self._supervisor, heartbeat=self._deadlines.heartbeat)

    async def start(self) -> None:
        """Spawn the ranks and build their engines; again after ``stop``."""
        self._group = self._new_group()
        self._started = False
        self.version = 0
        deadline = self._deadlines.start
        arguments = (self._head, self._seed, self._steps, str(self._folder))
        timeout = max(
            self._config.comm.init_timeout_seconds, math.ceil(outlasting(self._deadlines))
        )
        config = replace(
            self._config, comm=replace(self._config.comm, init_timeout_seconds=timeout)
        )
        await self._group.spawn(
            self.actor, self._place, config, self._model, *arguments, deadline=deadline
        )
        await self._group.call("start", deadline=deadline)
        self._started = True

    async def forward(self, batch: Batch, *, temperature: float = 1.0) -> Outputs:
        """``logprobs`` and ``entropy`` of each token, or a critic's ``values``, float32 [T] in the
        batch's order.
        """
        shares = self._shares(batch)
        return _merge(
            batch, shares, await self._call_leaders("forward", batch, shares, temperature)
        )

    async def forward_backward(
        self,
        batch: Batch,
        loss: Configurable.Config,
        *,
        temperature: float = 1.0,
        weight: float = 1.0,
    ) -> tuple[Outputs, Metrics]:
        """Add the gradient of ``loss`` on ``batch``, times ``weight``; what ``forward`` returns,
        and metrics.
        """
        shares = self._shares(batch)
        answers = await self._call_leaders(
            "forward_backward", batch, shares, loss, temperature, weight
        )
        return _merge(batch, shares, [outputs for outputs, _ in answers]), answers[0][1]

    async def optim_step(self, **options: Any) -> Metrics:
        """Step on what was accumulated; ``version`` counts up unless the step was skipped.

        ``options`` are those of TrainingEngine.optim_step: denominator, lr, betas, weight_decay,
        max_norm.
        """
        self.version, metrics = (await self.call("optim_step", options))[0]
        return metrics

    async def call(self, name: str, *args: Any) -> list[Any]:
        """Call an endpoint of every rank, such as ``export_hf``; return results in rank order."""
        return await self._group.call(name, *args, deadline=self._deadlines.call)

    async def offload(self) -> None:
        """Move parameters, gradients and optimizer state to host memory."""
        await self.call("offload")

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Bring back parameters, or gradients and optimizer state, bit for bit."""
        await self.call("onload", model, optimizer)

    async def weight_digests(self, dtype: torch.dtype | None = None) -> list[ShardDigests]:
        """Digests of every rank's shards, cast to ``dtype`` if given."""
        return await self.call("weight_digests", dtype)

    async def load_checkpoint(self, step: int = -1) -> tuple[dict[str, Any], list[str]]:
        """Load checkpoint ``step``, the newest if -1, or for 0 and where there is none what the
        config starts from.

        Returns the controller's state, and the names of checkpoints that were ignored because they
        are incomplete.
        """
        self.version, run_state, self.loaded, ignored = (await self.call("load_checkpoint", step))[
            0
        ]
        return run_state, ignored

    async def load_weights(self, folder: Path, version: int | None = None) -> None:
        """Take the parameters that ``save_weights`` wrote, bit for bit; they are of ``version``, if
        given.
        """
        await self.call("load_weights", folder, version)
        self.version = self.version if version is None else version

    async def close(self) -> None:
        """Finish saves and leave; the processes end."""
        await self.call("close")
        await self.stop()

    async def stop(self) -> None:
        """End the processes, whatever they are doing. Raises nothing."""
        await self._group.stop()

    def _shares(self, batch: Batch) -> list[list[int]]:
        """Sequences of each data-parallel rank."""
        return balanced(batch.lengths.tolist(), self._config.dp_degree)

    async def _call_leaders(
        self, endpoint_name: str, batch: Batch, shares: list[list[int]], *args: Any
    ) -> list[Any]:
        """Call every rank, sending each part of the batch once; the answers of the data-parallel
        ranks.
        """
        per_share = self._config.ranks // len(shares)
        arguments: dict[int, tuple[Any, ...]] = dict.fromkeys(
            range(self._config.ranks), (None, *args)
        )
        for number, share in enumerate(shares):
            arguments[number * per_share] = (batch.select(share), *args)
        return (
            await self._group.call_each(endpoint_name, arguments, deadline=self._deadlines.call)
        )[::per_share]


def _merge(batch: Batch, shares: list[list[int]], answers: list[Outputs]) -> Outputs:
    """Per-token values of the whole batch, from those of its shares."""
    merged = {name: torch.zeros(len(batch.tokens)) for name in answers[0]}
    for share, outputs in zip(shares, answers, strict=True):
        index = batch.token_index(share)
        for name, values in outputs.items():
            merged[name][index] = values
    return merged
