"""Life cycle of a run: claim, start, resume, step, save, leave, recover, end."""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.config import RolloutRecordConfig, RunConfig
from rl.errors import ActorFailure, NothingLearned, RunError, require
from rl.observe.checkpoint_folders import StepFolders
from rl.observe.events import Events
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.observe.rollout_files import Chunk
from rl.observe.spans import Stopwatch
from rl.session.concurrency import Signal, background
from rl.session.profiles import profiled
from rl.session.session import Session
from rl.trainers.advice import NOTHING_LEARNED, FailedCall, lost_group
from rl.trainers.hooks import Hooks
from rl.trainers.report import Report
from rl.trainers.run_folder import RunFolder, claim_run
from rl.types import Rollout


class Run:
    """Run of a trainer, from the first step or the newest checkpoint to the last step.

    ``open`` claims the run folder and makes the session. ``train_until_done`` trains; if a model is
    lost, it goes back to the newest checkpoint. ``end`` ends all processes.
    """

    record: RunRecord
    """Files of the run. Like all attributes of the folder, it exists once the folder is claimed."""
    events: Events
    """Events of the run."""
    progress: Progress
    """Line that shows where the run stands."""
    checkpoints: StepFolders
    """Checkpoints of the run."""
    watch: Stopwatch
    """Times of the session's calls."""
    report: Report
    """Report of each step."""
    describe: Callable[[Path], None] = staticmethod(lambda path: None)
    """Function that adds files without weights, such as the tokenizer, to an exported folder."""

    def __init__(
        self,
        trainer: Hooks[Any],
        folder: RunFolder | None,
        make_session: Callable[..., Awaitable[Session]],
    ):
        """``folder`` is the folder that the run uses, by default a new one as the config says."""
        self.changed = Signal()
        self.is_training = False
        self.leaving = False
        self.folder: RunFolder | None = None
        self.trainer = trainer
        self._make_session = make_session
        self._session: Session | None = None
        self._is_ready = False
        self._shown = AsyncExitStack()
        self._saved = 0
        self._step_rollouts: Sequence[Sequence[Rollout]] | None = None
        self._step_error: BaseException | None = None
        if folder is not None:
            self._use(folder)

    @property
    def config(self) -> RunConfig:
        """Config of the run."""
        config: RunConfig = self.trainer.arguments
        return config

    @property
    def is_open(self) -> bool:
        """Whether the session exists."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """Session of the run. Raises RunError unless a call has made it."""
        if self._session is None:
            raise RunError("the trainer is not open; call train or evaluate first")
        return self._session

    def _use(self, folder: RunFolder) -> None:
        self.folder = folder
        self.record = folder.record
        self.events = folder.events
        self.progress = folder.progress
        self.checkpoints = folder.checkpoints

    def claim(self, name: str = "", command: str = "") -> RunFolder:
        """Return the run folder, claimed by this process for the config ``name``. ``command``
        starts the run; empty for a script.
        """
        if self.folder is None:
            name = name or type(self.trainer).__name__
            self._use(claim_run(self.config, self.trainer.total_steps, name=name, command=command))
        assert self.folder is not None, "it was claimed"
        return self.folder

    async def open(self) -> None:
        """Claim the run folder, make the session and have the trainer assemble its parts."""
        if self._session is not None:
            return
        folder = self.claim()
        self._shown.enter_context(folder.progress)
        if address := self.config.sinks.prometheus:
            from rl.session.metrics_page import metrics_server

            page = metrics_server(address, folder.folder.name, folder.events, lambda: self._session)
            await self._shown.enter_async_context(page)
        trainer = self.trainer
        updates = trainer.total_steps * self.config.updates_per_step
        session = await self._make_session(
            replace(trainer.session_config, optimizer_steps=updates),
            task=trainer.task,
            folder=folder.folder,
            logs=folder.record.logs,
            events=folder.events,
        )
        self.report = Report(
            self.config, folder.record, folder.events, session.watch, session.take_digests
        )
        self.attach(session)

    def attach(self, session: Session) -> None:
        """Use ``session``, and have the trainer assemble its parts."""
        self._session = session
        self.watch = session.watch
        self.trainer.assemble()

    async def end(self, *, at_once: bool = False) -> None:
        """End all processes, ``at_once`` or after saves under way."""
        session = self._session
        self._session = None
        self._is_ready = False
        folder = self.folder
        try:
            if session is not None and not at_once:
                await session.close()
        except ActorFailure as failure:
            if folder is None or not folder.is_complete:
                raise
            self.events.warn(f"{str(failure).splitlines()[0]}; the run was complete by then")
        finally:
            if session is not None:
                await session.stop()
            await self._shown.aclose()
            if folder is not None:
                folder.release()

    def leave(self) -> None:
        """Finish the step under way, save if the trainer allows, and end ``train_until_done``."""
        self.leaving = True
        self.changed.notify()

    async def train_until_done(self, step: int = -1) -> dict[str, Any] | None:
        """Train to the last step from checkpoint ``step``, the newest for -1; return the summary,
        None if ``leave`` ended the run before.

        Raises NothingLearned if no step changed the weights.
        """
        self.leaving = False
        folder = self.claim()
        folder.is_complete = False
        await self.open()
        self.progress.stage(self.session.describe())
        try:
            async with background(self.session.lost_node()):
                summary = await self._attempts(step)
        finally:
            self.is_training = False
        if summary is None:
            return None
        folder.conclude(summary)
        if summary["steps_learned"] == 0:
            raise NothingLearned(
                f"none of {self.trainer.step} steps changed the weights: {NOTHING_LEARNED}"
            )
        return summary

    async def _attempts(self, step: int) -> dict[str, Any] | None:
        """Train until the end; return the summary, None if ``leave`` ended the run before."""
        trainer = self.trainer
        while True:
            try:
                await self.restore_checkpoint(step)
                step = -1
                async with self.session.running():
                    async with trainer.working():
                        await trainer.between_steps()
                        await self._steps()
                    return None if self.leaving else await self._finish()
            except ActorFailure as failure:
                self.session.recover(failure)

    async def restore_checkpoint(self, step: int = -1) -> None:
        """Start the processes that do not run; load checkpoint ``step``, the newest for -1."""
        self.is_training = False  # nothing is lost by leaving at once
        self._step_rollouts = None
        session = self.session
        await session.start()
        state, ignored = await session.load(step)
        for name in ignored:
            self.events.note(f"ignored {name}: it is incomplete")
        self.trainer.step = self._saved = state.get("step", 0)
        await self.trainer.restore(state)
        self.claim().begin()
        self.report.resume_after(self._saved, state.get("watchdog", {}))
        if self._saved:
            self.events.note(f"resumed after step {self._saved}")
        plan = await session.connect()
        if plan:
            self.report.plan(plan)
        self._is_ready = True

    async def _steps(self) -> None:
        trainer = self.trainer
        self.is_training = True
        self.watch.lap()
        async with background(self.report.look_for_stalls()), AsyncExitStack() as profile:
            await self._profile(profile)
            while trainer.step < self.last_step and await trainer.train_step():
                await self._profile(profile)
                await trainer.between_steps()
                if trainer.step < self.last_step:
                    await self._save_and_export(trainer.step)
        await self.save_checkpoint()

    @property
    def last_step(self) -> int:
        """Number of steps of the run, whose evaluations may end it early."""
        stale = self.report.stale
        total = self.trainer.total_steps
        return total if stale is None else min(total, stale + self.trainer.ahead)

    async def _profile(self, profile: AsyncExitStack) -> None:
        """End the profile of the step before; begin that of the next one if the config says so."""
        await profile.aclose()
        config = self.config.profile
        step = self.trainer.step + 1
        if step in config.steps:
            folder = self.record.profiles.path(step)
            await profile.enter_async_context(profiled(self.session, config, folder))
            self.events.note(f"profiling step {step} into {folder}")

    @contextmanager
    def step_calls(self, rollouts: Sequence[Sequence[Rollout]] = ()) -> Iterator[None]:
        """Mark the block as the calls of a step, which ``rl.replay --failed`` can make again: with
        ``rollouts``, which the block may add to, or else with the examples of the data set.
        """
        self._step_rollouts = rollouts
        try:
            yield
        except Exception as error:  # not a cancellation, which another component caused
            self._step_error = error
            raise
        self._step_rollouts = None

    @property
    def is_in_step(self) -> bool:
        """Whether a run that is left now finishes a step first."""
        return self._step_rollouts is not None

    def keep_failed(self, error: BaseException) -> FailedCall:
        """Return the call that raised ``error``, and write the rollouts that a repetition needs,
        unless the config records none.

        Raises RunError if a file cannot be written.
        """
        lost = lost_group(error)
        if lost is not None and lost.rollouts:
            call = FailedCall("reward")
            rollouts: Sequence[Sequence[Rollout]] = [lost.rollouts]
        # the loss of a model may cancel the calls of a step before they raise
        elif self._step_rollouts is not None and (
            error is self._step_error
            or (isinstance(error, ActorFailure) and self.session.has(error.actor))
        ):
            call = FailedCall("step")
            rollouts = self._step_rollouts
        else:
            saved = self.folder.saved if self.folder else 0
            return FailedCall.outside_steps(error, self.trainer.step, saved=saved)
        record = self.config.record
        if rollouts and isinstance(record, RolloutRecordConfig) and record.rollouts == "none":
            return FailedCall(
                why_not="The rollouts of the failing call are not kept, since record.rollouts is "
                "'none'; a resumed run with --record.rollouts all keeps them if it fails again."
            )
        if rollouts:
            chunks = [Chunk(rollouts=chunk_rollouts, columns={}) for chunk_rollouts in rollouts]
            self.record.write_failed_rollouts(chunks, version=self.session.version)
        return call

    async def _save_and_export(self, step: int) -> None:
        """Save a checkpoint and export the model if the config says so after ``step``."""
        checkpoint = self.config.trainer.checkpoint
        first = checkpoint.enable_first_step_checkpoint and step == 1
        if checkpoint.enable and (first or step % checkpoint.interval == 0):
            await self.save_checkpoint()
        every = self.config.export_every
        if every and step % every == 0:
            with self.watch.span("checkpoint"):
                await self.export(self.record.folder / "exports" / f"step-{step}")

    async def save_checkpoint(self) -> None:
        """Save model, optimizer and what ``snapshot`` returns as of this step, unless they are
        saved.
        """
        step = self.trainer.step
        if step in (self._saved, 0):
            return
        state = await self.trainer.snapshot()
        if state is None:
            return
        with self.watch.span("checkpoint"):
            facts = {"step": step, "watchdog": self.report.to_dict()}
            await self.session.save(step, facts | state)
        self._saved = step
        self.events.emit("checkpoint", step=step)

    async def export(self, path: Path) -> None:
        """Write the model as a Hugging Face folder."""
        update = await self.session.export_hf(path)
        self.describe(path)
        (self.events.warn if update.loses_most else self.events.note)(
            f"exported to {path}; {update.describe()}".removesuffix("; ")
        )

    async def _finish(self) -> dict[str, Any] | None:
        """Export, then evaluate; return the summary, None if ``leave`` ended the evaluation.

        The summary is also written before the evaluation, which may fail.
        """
        trainer = self.trainer
        self.progress.stage("exporting the model")
        export = self.record.folder / "export"
        await self.export(export)
        rows = self.record.read_metrics()
        summary: dict[str, Any] = {
            "steps": trainer.step,
            "steps_learned": sum(row["trainer/updates"] > 0 for row in rows),
            "policy_version": self.session.version,
            **self._facts(),
            "policy_digest": await self.session.weight_digest(),
            "export": str(export),
        }
        self.record.write_json("summary.json", summary)
        self.progress.stage("evaluating on held-out data")
        scores = await self.unless_leaving(trainer.scores())
        if scores is None:
            return None
        self.report.best.note(trainer.step, scores)
        return summary | scores | self.report.best.facts() | self._facts()

    def _facts(self) -> dict[str, Any]:
        restarts = self.session.restarts
        return {"restarts": sum(restarts.values()), **restarts, **self.trainer.facts()}

    async def unless_leaving(
        self, work: Coroutine[Any, Any, dict[str, float]]
    ) -> dict[str, float] | None:
        """Return the result of ``work``; cancel it and return None if the run is left before."""
        return await self.changed.unless(lambda: self.leaving, work)

    @asynccontextmanager
    async def with_weights_of(self, step: int | None, version: int = 0) -> AsyncIterator[None]:
        """Have all processes hold the weights of checkpoint ``step``, policy ``version``, inside
        the block; None for the present weights.
        """
        await self.open()
        if not self._is_ready:
            await self.restore_checkpoint()
        if step is None or step == self.trainer.step:
            yield
            return
        complete = self.checkpoints.complete()
        require(
            step in complete,
            f"state.step is {step}; the run has checkpoints of the steps {complete}",
        )
        await self.save_checkpoint()
        present = self.session.version
        await self._hold(step, version)
        try:
            yield
        finally:
            await self._hold(self.trainer.step, present)

    async def _hold(self, step: int, version: int) -> None:
        await self.session.load_weights(self.checkpoints.path(step), version)
        await self.session.connect()
