"""Protocol of all trainers: train, evaluate, save_pretrained, and what a run asks of a trainer."""

import asyncio
import functools
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP

from rl.config import RunConfig
from rl.errors import ConfigError, Interrupted
from rl.host.threads import DaemonThread
from rl.session.session import Session
from rl.session.session_config import SessionConfig
from rl.trainers.endings import Interrupts, fail
from rl.trainers.hooks import Arguments, Hooks, MetricCalculator
from rl.trainers.report import Report
from rl.trainers.run import Run
from rl.trainers.run_folder import RunFolder, pin_cpu_settings, pin_datasets
from rl.validation import validate


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Point of a run: the result of ``train``, and an argument of all three verbs."""

    step: int
    """Number of completed steps."""
    version: int
    """Number of optimizer steps that changed the weights."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the summary; empty before the end of the run."""


class Trainer(Hooks[Arguments]):
    """Base of all trainers. ::

        async with rl.RLTrainer(config) as trainer:
            state = await trainer.train()
            await trainer.save_pretrained("my-model")

    A script without an event loop uses a plain ``with`` block, or :meth:`blocking`::

        with rl.RLTrainer(config) as trainer:
            state = trainer.train()

    The constructor reads data and tries the user's code; no process starts. The first call claims
    the run folder and starts the processes. They live until ``close``.

    A trainer of your own overrides one of ``configure_model``, ``configure_dataloaders`` and
    ``configure_functions``, which the constructor calls once and in this order, or ``train_step``.
    The hooks of its base are for trainers with more than a model to start, save or evaluate.
    """

    def __init__(
        self,
        arguments: Arguments,
        dataset_train: Any = None,
        dataset_eval: Any = None,
        *,
        folder: RunFolder | None = None,
        make_session: Callable[..., Awaitable[Session]] = Session.on_nodes,
    ):
        """Read the data, start nothing.

        ``folder`` is the run folder, by default a new one as ``arguments`` says. ``make_session``
        returns the session, by default :meth:`Session.on_nodes`. Raises ConfigError, naming field,
        value and what is allowed.
        """
        validate(arguments)
        pin_datasets(arguments)
        pin_cpu_settings(arguments)
        self.arguments = arguments
        self.dataset_train = dataset_train
        self.dataset_eval = dataset_eval
        self.step = 0
        self.run = Run(self, folder, make_session)
        self._metrics: Mapping[str, float] = {}
        self.session_config = self.configure_model()
        self.configure_dataloaders()
        self.configure_functions()

    # Verbs.

    async def train(self, state: TrainerState | None = None) -> TrainerState:
        """Train to the last step; return the :class:`TrainerState` at the end.

        Training goes on from the newest checkpoint of the run, or from the checkpoint of
        ``state``, which discards newer ones. Raises :class:`rl.errors.Interrupted` if ``leave`` or
        a signal ended the run before its last step, after saving.
        """
        folder = self.run.claim()
        with Interrupts(self.run) as interrupts:
            try:
                summary = await interrupts.train(-1 if state is None else state.step)
            except (ConfigError, Interrupted):
                raise
            except Exception as error:
                fail(error, folder, self.run)
                raise
        self._metrics = {name: value for name, value in summary.items() if isinstance(value, float)}
        return self.state

    async def evaluate(
        self, state: TrainerState | None = None, metric_calculator: MetricCalculator | None = None
    ) -> dict[str, float]:
        """Return metrics on the held-out data, by name.

        The weights are the present ones, or those of the checkpoint of ``state``. Weights, random
        states and the order of the data are the same afterwards. ``metric_calculator`` gets what
        the trainer evaluates, and returns metrics of its own.
        """
        async with self.run.with_weights_of(*_point(state)), self.session.running():
            return await self.scores(metric_calculator)

    async def save_pretrained(self, path: str | Path, state: TrainerState | None = None) -> None:
        """Write the weights, config and tokenizer as a Hugging Face folder ``path``.

        The weights are the present ones, or those of the checkpoint of ``state``.
        """
        async with self.run.with_weights_of(*_point(state)):
            await self.run.export(Path(path))

    async def close(self) -> None:
        """End all processes after saves under way; closing twice is closing once."""
        await self.run.end()

    def leave(self) -> None:
        """Finish the step under way, save, and end ``train``. If an evaluation of older weights has
        not ended, nothing is saved: the resumed run begins at the checkpoint of that evaluation.
        """
        self.run.leave()

    def blocking(self) -> "BlockingTrainer":
        """Return this trainer with verbs that wait for their results."""
        return BlockingTrainer(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> "BlockingTrainer":
        self._blocking = self.blocking()
        return self._blocking

    def __exit__(self, *_: object) -> None:
        self._blocking.close()

    # Properties.

    @property
    def session(self) -> Session:
        """The session of this trainer, once a call has made it."""
        return self.run.session

    @property
    def model(self) -> Session:
        """The session, which holds the models."""
        return self.run.session

    @property
    def report(self) -> Report:
        """Report of each step, once a call has made the session."""
        return self.run.report

    @property
    def leaving(self) -> bool:
        """Whether the run ends before its next step."""
        return self.run.leaving

    @property
    def state(self) -> TrainerState:
        """Point that the run has reached."""
        version = self.session.version if self.run.is_open else 0
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

    # What a trainer trains, on what, and how.

    def configure_model(self) -> SessionConfig:
        """Return the models that the session holds, and where they run."""
        return self.arguments.session()

    @abstractmethod
    def configure_dataloaders(self) -> None:
        """Set ``dataset_train`` and ``dataset_eval`` unless the caller gave them."""

    @abstractmethod
    def configure_functions(self) -> None:
        """Set the functions of a step, such as the loss."""


class BlockingTrainer:
    """All members of a :class:`Trainer`; its coroutines are calls that wait for their results. ::

    trainer = rl.RLTrainer(config).blocking()
    state = trainer.train()
    trainer.close()

    If an event loop runs in the thread of the caller, as in a notebook, coroutines run in another
    thread. There, the first interrupt makes ``train`` finish its step, save and raise
    :class:`rl.errors.Interrupted`. Any other interrupt cancels the call.
    """

    def __init__(self, trainer: Trainer[Any]):
        self._trainer = trainer
        self._runner = asyncio.Runner()
        self._thread = DaemonThread("trainer")

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._trainer, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute

        @functools.wraps(attribute)
        def wait(*args: Any, **kwargs: Any) -> Any:
            return self._run(attribute(*args, **kwargs), trains=name == "train")

        return wait

    def __setattr__(self, name: str, value: Any) -> None:
        owner = self if name in ("_trainer", "_runner", "_thread") else self._trainer
        object.__setattr__(owner, name, value)

    def __dir__(self) -> list[str]:
        return dir(self._trainer)

    def close(self) -> None:
        """End all processes after saves under way; closing twice is closing once."""
        self._run(self._trainer.close())
        self._thread.submit(self._runner.close).result()
        self._runner = asyncio.Runner()
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: Coroutine[Any, Any, Any], *, trains: bool = False) -> Any:
        if asyncio._get_running_loop() is None:
            return self._runner.run(call)
        run = self._trainer.run
        loop = self._thread.submit(self._runner.get_loop).result()
        tasks: list[asyncio.Task[Any]] = []

        def work() -> Any:
            tasks.append(loop.create_task(call))
            return loop.run_until_complete(tasks[0])

        future = self._thread.submit(work)
        try:
            while True:
                try:
                    return future.result()
                except KeyboardInterrupt:
                    if future.done() or run.leaving or not (trains and run.is_training):
                        raise
                    run.progress.note("interrupt: leaving after this step; a second one cancels it")
                    loop.call_soon_threadsafe(run.leave)
        except KeyboardInterrupt:  # also one that comes while the first is handled
            if not future.cancel():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            raise


def _point(state: TrainerState | None) -> tuple[int | None, int]:
    return (None, 0) if state is None else (state.step, state.version)


def trainer_of(config: RunConfig) -> Trainer[Any]:
    """Return the trainer that runs ``config``. Raises ConfigError as its constructor does."""
    module, _, name = config.trainer_class.partition(":")
    trainer: Trainer[Any] = getattr(import_module(module), name)(config)
    return trainer
