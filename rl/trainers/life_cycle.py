"""Life cycle that all trainers share: start, resume, step, save, leave, recover, end."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rl.config import RunConfig
from rl.errors import ActorFailure, NothingLearned, RunError
from rl.observe.events import Events
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.session.concurrency import Signal, background
from rl.session.config import SessionConfig
from rl.session.session import Session
from rl.step_folders import StepFolders
from rl.tasks.base import Task
from rl.trainers.attempt import Again, Attempt
from rl.trainers.endings import Interrupts
from rl.trainers.report import Report
from rl.trainers.run_folder import RunFolder, claim_run
from rl.validation import validate

Arguments = TypeVar("Arguments", bound=RunConfig)
MetricCalculator = Callable[[Any], Mapping[str, float]]
NOTHING_LEARNED = (
    "every gradient was 0 or not finite, the learning rate was 0, or bfloat16 parameters rounded "
    "every update away; see trainer/grad_norm and trainer/skipped_steps in metrics.jsonl. If "
    "reward/zero_std_groups is 1 there, all completions of a prompt had equal rewards: start from "
    "a model that succeeds at times, or reward a part of the task"
)


class LifeCycle(ABC, Generic[Arguments]):
    """Run of a trainer, from the first step or the newest checkpoint to the last step.

    - The constructor reads data and tries the user's code. No process starts.
    - ``open`` claims the run folder and makes the session.
    - ``live`` trains. If a model is lost, it goes back to the newest checkpoint.
    - ``end`` ends all processes and gives the run folder back.

    A trainer says what a step is and what a checkpoint keeps beside model and optimizer.
    """

    task: Task.Config | None = None
    """Task with the reward of completions; None for trainers without rollouts."""

    def __init__(
        self,
        arguments: Arguments,
        dataset_train: Any = None,
        dataset_eval: Any = None,
        *,
        run: RunFolder | None = None,
        make_session: Callable[..., Awaitable[Session]] = Session.on_nodes,
    ):
        """Read the data, start nothing.

        ``run`` is the folder that the run uses, by default a new one as ``arguments`` says.
        ``make_session`` returns the session, by default :meth:`Session.on_nodes`.
        Raises ConfigError, naming field, value and what is allowed.
        """
        validate(arguments)
        self.arguments = arguments
        self.dataset_train = dataset_train
        self.dataset_eval = dataset_eval
        self.changed = Signal()
        self.step = 0
        """Number of completed steps."""
        self.is_training = False
        self.leaving = False
        self.attempt = Attempt()
        self.run = run
        self._make_session = make_session
        self._session: Session | None = None
        self._is_ready = False
        self._shown = ExitStack()
        self._saved = 0
        self._session_config = self.configure_model()
        self.configure_dataloaders()
        self.configure_functions()

    # What a trainer trains, on what, and how.

    @abstractmethod
    def configure_model(self) -> SessionConfig:
        """Return the models that the session holds, and where they run."""

    @abstractmethod
    def configure_dataloaders(self) -> None:
        """Set ``dataset_train`` and ``dataset_eval`` unless the caller gave them."""

    @abstractmethod
    def configure_functions(self) -> None:
        """Set the functions of a step, such as the loss."""

    @abstractmethod
    async def train_step(self) -> bool:
        """Take one step and count it in ``step``; return False if the run is left before it."""

    # Hooks of a trainer with more than a model to start, save or evaluate.

    def assemble(self) -> None:
        """Make the parts that need the session and the run folder. Called once both exist."""

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.arguments.steps

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines that run beside the steps."""
        return []

    async def restore(self, state: dict[str, Any]) -> None:
        """Go back to ``state``, which ``snapshot`` returned; {} is the start of the run."""

    async def prepare(self) -> None:
        """Prepare training before its first step. Returns early if the run is left."""

    async def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside model, optimizer and step, as JSON.

        Files go to the folder of the checkpoint first.
        """
        return {}

    async def before_steps(self) -> None:
        """Do the work that is due before the first step, or had not ended at the checkpoint."""

    async def after_step(self) -> None:
        """Do the work that is due between a step and its checkpoint, such as an evaluation."""

    async def wind_down(self) -> None:
        """Wait for what still runs after the last step."""

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return metrics of the weights on ``dataset_eval``, named ``eval/…``; {} without data."""
        return {}

    def describe(self, path: Path) -> None:
        """Add files without weights, such as the tokenizer, to the exported folder ``path``."""

    def facts(self) -> dict[str, Any]:
        """Return counts for the summary."""
        restarts = self.session.restarts
        return {"restarts": sum(restarts.values()), **restarts}

    def whereabouts(self) -> dict[str, Any]:
        """Return where the run stands, for ``failure.json``."""
        facts: dict[str, Any] = {"step": self.step}
        if self._session is not None:
            facts["policy_version"] = self._session.version
            facts["generator_versions"] = self._session.generator_versions
        return facts

    def keep_failed(self, error: BaseException) -> Again:
        """Keep what making the failing call again needs; return which call that is, or why it
        cannot be made.

        Raises RunError if a file cannot be written.
        """
        if self._session is not None and self.attempt.ended_with(error, self._session):
            return self.keep_step()
        return Again.never(error, self.step, saved=self.run.saved if self.run else 0)

    def keep_step(self) -> Again:
        """Keep what taking the failing step again needs: see ``keep_failed``."""
        return Again(why_not=f"{type(self).__name__} has no steps that rl.replay can take again.")

    @property
    def is_in_step(self) -> bool:
        """Whether leaving now finishes a step first."""
        return self.is_training

    @property
    def session(self) -> Session:
        """The session of this trainer, once a call has made it."""
        if self._session is None:
            raise RunError("the trainer is not open; call train or evaluate first")
        return self._session

    @property
    def record(self) -> RunRecord:
        """Files of the run."""
        assert self.run is not None, "open comes first"
        return self.run.record

    @property
    def progress(self) -> Progress:
        """Line that shows where the run stands."""
        assert self.run is not None, "open comes first"
        return self.run.progress

    @property
    def events(self) -> Events:
        """Events of the run."""
        assert self.run is not None, "open comes first"
        return self.run.events

    @property
    def checkpoints(self) -> StepFolders:
        """Checkpoints of the run."""
        assert self.run is not None, "open comes first"
        return self.run.checkpoints

    @property
    def is_open(self) -> bool:
        """Whether the session of this trainer exists."""
        return self._session is not None

    def claim(self) -> RunFolder:
        """Return the run folder, claimed by this process."""
        if self.run is None:
            name = type(self).__name__
            command = f"{name}(…).train()"
            self.run = claim_run(self.arguments, self.total_steps, name=name, command=command)
        return self.run

    async def open(self) -> None:
        """Claim the run folder and make the session, unless that was done."""
        if self._session is not None:
            return
        self.run = self.claim()
        self._shown.enter_context(self.run.progress)
        updates = self.total_steps * self.arguments.updates_per_step
        self._session = await self._make_session(
            replace(self._session_config, optimizer_steps=updates),
            task=self.task,
            folder=self.run.folder,
            logs=self.run.record.logs,
            events=self.run.events,
        )
        self.watch = self._session.watch
        self.report = Report(
            self.arguments,
            self.run.record,
            self.run.events,
            self.watch,
            self._session.take_digests,
        )
        self.assemble()

    async def end(self, *, at_once: bool = False) -> None:
        """End all processes, ``at_once`` or after saves under way."""
        session = self._session
        self._session = None
        self._is_ready = False
        try:
            if session is not None and not at_once:
                await session.close()
        except ActorFailure as failure:
            if self.run is None or not self.run.is_complete:
                raise
            self.events.warn(f"{str(failure).splitlines()[0]}; the run was complete by then")
        finally:
            if session is not None:
                await session.stop()
            self._shown.close()
            if self.run is not None:
                self.run.release()

    def leave(self) -> None:
        """Finish the step under way, save, and end ``train``. The resumed run repeats an unfinished
        evaluation.
        """
        self.leaving = True
        self.changed.notify()

    async def go_back(self, step: int = -1) -> None:
        """Start the processes that do not run; load checkpoint ``step``, the newest for -1."""
        self.is_training = False  # nothing is lost by leaving at once
        self.attempt = Attempt()
        session = self.session
        await session.start()
        state, ignored = await session.load(step)
        for name in ignored:
            self.events.note(f"ignored {name}: it is incomplete")
        self.step = self._saved = state.get("step", 0)
        self.report.go_back(self.step, state.get("watchdog", {}))
        if self.step:
            self.events.note(f"resumed after step {self.step}")
        await self.restore(state)
        plan = await session.connect()
        if plan:
            self.report.plan(plan)
        self._is_ready = True

    async def live(self, interrupts: Interrupts, step: int = -1) -> dict[str, Any]:
        """Train to the last step from checkpoint ``step``, the newest for -1; return the summary.

        Raises Interrupted after ``leave``, and after a signal that ``interrupts`` received.
        """
        self.leaving = False
        self.claim().is_complete = False
        try:
            await self.open()
            self.progress.stage(self.session.describe())
            async with background(self.session.lost_node()):
                summary = await self._attempts(step)
        except asyncio.CancelledError:
            if not interrupts.name:
                raise  # the caller's, or the loop ends
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            raise interrupts.interrupted() from None
        if summary is None:
            raise interrupts.interrupted()
        assert self.run is not None, "open made the run"
        self.run.conclude(summary)
        if summary["steps_learned"] == 0:
            raise NothingLearned(
                f"none of {self.step} steps changed the weights: {NOTHING_LEARNED}"
            )
        return summary

    async def _attempts(self, step: int) -> dict[str, Any] | None:
        """Train until the end; return the summary, None if ``leave`` ended the run before."""
        while True:
            try:
                await self.go_back(step)
                step = -1
                async with self.session.running(), background(*self.work()):
                    await self.prepare()
                    await self._steps()
                    return None if self.leaving else await self.finish()
            except ActorFailure as failure:
                self.session.recover(failure)

    async def _steps(self) -> None:
        self.is_training = True
        self.watch.lap()
        async with background(self.report.look_for_stalls()):
            await self.before_steps()
            while self.step < self.total_steps and await self.train_step():
                await self.after_step()
                await self._save_if_due()
                await self._export_if_due()
        await self.save_checkpoint()
        await self.wind_down()

    async def _save_if_due(self) -> None:
        checkpoint = self.arguments.trainer.checkpoint
        first = checkpoint.enable_first_step_checkpoint and self.step == 1
        is_due = checkpoint.enable and (first or self.step % checkpoint.interval == 0)
        if is_due and self.step < self.total_steps:
            await self.save_checkpoint()

    async def _export_if_due(self) -> None:
        every = self.arguments.export_every
        if every and self.step % every == 0 and self.step < self.total_steps:
            with self.watch.span("checkpoint"):
                await self.export(self.record.folder / "exports" / f"step-{self.step}")

    async def save_checkpoint(self) -> None:
        """Save model, optimizer and what ``snapshot`` returns as of this step."""
        if self.step in (self._saved, 0):
            return
        with self.watch.span("checkpoint"):
            state = {"step": self.step, "watchdog": self.report.to_dict()} | await self.snapshot()
            await self.session.save(self.step, state)
        self._saved = self.step
        self.events.emit("checkpoint", step=self.step)

    async def finish(self) -> dict[str, Any] | None:
        """Export, then evaluate; return the summary, None if ``leave`` ended the evaluation.

        The summary is also written before the evaluation, which may fail.
        """
        self.progress.stage("exporting the model")
        export = self.record.folder / "export"
        await self.export(export)
        rows = self.record.read_metrics()
        summary: dict[str, Any] = {
            "steps": self.step,
            "steps_learned": sum(row["trainer/updates"] > 0 for row in rows),
            "policy_version": self.session.version,
            **self.facts(),
            "policy_digest": await self.session.weight_digest(),
            "export": str(export),
        }
        self.record.write_summary(summary)
        self.events.note(f"exported to {export}")
        self.progress.stage("evaluating on held-out data")
        scores = await self.scores_unless_leaving()
        return None if scores is None else summary | scores | self.facts()

    async def scores_unless_leaving(self) -> dict[str, float] | None:
        """Return the scores of the present weights, or None if a signal ends the run meanwhile."""
        return await self.changed.unless(lambda: self.leaving, self.scores())

    async def export(self, path: Path) -> None:
        """Write the model as a Hugging Face folder."""
        await self.session.export_hf(path)
        self.describe(path)
