"""Hooks that a run calls, one set for all trainers."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from rl.config import RunConfig
from rl.environments.task import Task
from rl.session.session_config import SessionConfig

Arguments = TypeVar("Arguments", bound=RunConfig)
MetricCalculator = Callable[[Any], Mapping[str, float]]


class Hooks(ABC, Generic[Arguments]):
    """Methods of a trainer that its :class:`rl.trainers.run.Run` calls. ::

    hooks.assemble()                       # once
    await hooks.restore(state)             # these four again after each loss of a model
    async with hooks.working():
        await hooks.between_steps()
        while await hooks.train_step():
            await hooks.between_steps()
            state = await hooks.snapshot() # if a checkpoint is due
    await hooks.scores()
    """

    arguments: Arguments
    task: Task.Config | None = None
    """Task with the reward of completions; None for trainers without rollouts."""
    session_config: SessionConfig
    step: int
    """Number of completed steps."""

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.arguments.steps

    ahead = 0
    """Number of steps that are still taken after the one whose evaluation ends the run early."""

    def assemble(self) -> None:
        """Make the parts that need the session and the run folder. Called once both exist."""

    async def restore(self, state: dict[str, Any]) -> None:
        """Go back to ``state``, which ``snapshot`` returned; {} is the start of the run."""

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Do the work beside the steps, which are taken inside the block. At the end of the block,
        wait for what still runs after the last step.
        """
        yield

    @abstractmethod
    async def train_step(self) -> bool:
        """Take one step and count it in ``step``; return False if the run is left before it."""

    async def between_steps(self) -> None:
        """Do the work that is due before the first step, or between a step and its checkpoint, such
        as an evaluation. Return early if the run is left.
        """

    async def snapshot(self) -> dict[str, Any] | None:
        """Return what a checkpoint of this step keeps beside model, optimizer and step, as JSON.
        None if a run could not resume from the checkpoint.

        Files go to the folder of the checkpoint first.
        """
        return {}

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return metrics of the weights on the held-out data, named ``eval/…``; {} without any."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return counts for the summary and for ``failure.json``."""
        return {}
