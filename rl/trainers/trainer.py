"""Protocol of all trainers: train, evaluate, save_pretrained, in a script or in a coroutine."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP

from rl.config import RunConfig
from rl.errors import ConfigError, Interrupted, require
from rl.session.session import Session
from rl.trainers.endings import Interrupts, fail
from rl.trainers.life_cycle import Arguments, LifeCycle, MetricCalculator

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """A point of a run: what ``train``, ``evaluate`` and ``save_pretrained`` return and take."""

    step: int
    """Number of completed steps."""
    version: int
    """Number of optimizer steps that changed the weights."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the summary; empty before the end of the run."""


class Trainer(LifeCycle[Arguments]):
    """Base of all trainers. ::

        trainer = rl.RLTrainer(config)
        state = trainer.train()                    # in a script: returns when the run has ended
        state = await trainer.train()              # in a coroutine
        trainer.save_pretrained("my-model")
        trainer.close()                            # or a ``with`` or ``async with`` block

    The constructor reads data and tries the user's code; no process starts. The first call claims
    the run folder and starts the processes. They live until ``close``.

    A trainer of your own overrides one of ``configure_model``, ``configure_dataloaders`` and
    ``configure_functions``, which the constructor calls once and in this order, or ``train_step``.
    """

    _runner: asyncio.Runner | None = None
    _metrics: Mapping[str, float] = {}

    def train(self, state: TrainerState | None = None) -> Any:
        """Train to the last step; return the :class:`TrainerState` at the end.

        Training goes on from the newest checkpoint of the run, or from the checkpoint of
        ``state``, which discards newer ones. Raises :class:`rl.errors.Interrupted` if ``leave`` or
        a signal ended the run before its last step, after saving.
        """
        return self._call(self._train(state))

    def evaluate(
        self,
        state: TrainerState | None = None,
        metric_calculator: MetricCalculator | None = None,
    ) -> Any:
        """Return metrics on the held-out data, by name.

        The weights are the present ones, or those of the checkpoint of ``state``. Weights, random
        states and the order of the data are the same afterwards. ``metric_calculator`` gets what
        the trainer evaluates, and returns metrics of its own.
        """
        return self._call(self._evaluate(state, metric_calculator))

    def save_pretrained(self, path: str | Path, state: TrainerState | None = None) -> Any:
        """Write the weights, config and tokenizer as a Hugging Face folder ``path``.

        The weights are the present ones, or those of the checkpoint of ``state``.
        """
        return self._call(self._save_pretrained(Path(path), state))

    def close(self) -> Any:
        """End all processes after saves under way; closing twice is closing once."""
        ended = self._call(self.end())
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        return ended

    @property
    def model(self) -> Session:
        """The session, which holds the models."""
        return self.session

    @property
    def state(self) -> TrainerState:
        """Point that the run has reached."""
        version = self._session.version if self._session is not None else 0
        return TrainerState(self.step, version, self._metrics)

    @property
    def dtype(self) -> torch.dtype:
        """Type in which the model computes."""
        return TORCH_DTYPE_MAP[self.arguments.trainer.training.mixed_precision_param]

    @property
    def param_dtype(self) -> torch.dtype:
        """Type in which the parameters are kept."""
        return TORCH_DTYPE_MAP[self.arguments.trainer.training.dtype]

    @property
    def optimizer(self) -> OptimizersContainer.Config:
        """Config of the optimizer."""
        return self.arguments.trainer.optimizer

    @property
    def scheduler(self) -> LRSchedulersContainer.Config:
        """Config of the learning rate schedule."""
        return self.arguments.trainer.lr_scheduler

    def _call(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T] | T:
        """Return ``work`` to a coroutine that awaits it; run it for code without an event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._runner = self._runner or asyncio.Runner()
            return self._runner.run(work)
        return work

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def _train(self, state: TrainerState | None) -> TrainerState:
        run = self.claim()
        with Interrupts(self, run) as interrupts:
            try:
                summary = await self.live(interrupts, -1 if state is None else state.step)
            except (ConfigError, Interrupted):
                raise
            except Exception as error:
                fail(error, run, self)
                raise
        self._metrics = {name: each for name, each in summary.items() if isinstance(each, float)}
        return self.state

    async def _evaluate(
        self, state: TrainerState | None, metric_calculator: MetricCalculator | None
    ) -> dict[str, float]:
        async with self._weights_of(state), self.session.running():
            return await self.scores(metric_calculator)

    async def _save_pretrained(self, path: Path, state: TrainerState | None) -> None:
        async with self._weights_of(state):
            await self.export(path)

    @asynccontextmanager
    async def _weights_of(self, state: TrainerState | None) -> AsyncIterator[None]:
        """Have the model hold the weights of ``state`` inside the block."""
        await self.open()
        if not self._is_ready:
            await self.go_back()
        if state is None or state.step == self.step:
            yield
            return
        complete = self.checkpoints.complete()
        require(
            state.step in complete,
            f"state.step is {state.step}; the run has checkpoints of the steps {complete}",
        )
        await self.save_checkpoint()
        version = self.session.version
        await self._hold(state.step, state.version)
        try:
            yield
        finally:
            await self._hold(self.step, version)

    async def _hold(self, step: int, version: int) -> None:
        await self.session.load_weights(self.checkpoints.path(step), version)
        await self.session.connect()


def trainer_of(config: RunConfig) -> Trainer[Any]:
    """Return the trainer that runs ``config``. Raises ConfigError as its constructor does."""
    module, _, name = config.trainer_class.partition(":")
    trainer: Trainer[Any] = getattr(import_module(module), name)(config)
    return trainer
