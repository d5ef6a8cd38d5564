"""The RL loop: sample, score, compare, learn, push; as far ahead as staleness allows."""

import asyncio
from collections import Counter
from itertools import chain

from rl.algorithms.algorithm import Algorithm
from rl.config import RLConfig
from rl.errors import ActorFailure, RunError
from rl.metrics import Metrics
from rl.observe.progress import Progress
from rl.observe.record import RunRecord, failing_loudly
from rl.session.concurrency import Signal, background
from rl.session.session import Session
from rl.step_folders import ROLLOUTS, StepFolders
from rl.tasks.base import Task
from rl.trainers.companions import Companions
from rl.trainers.evaluation import Evaluation
from rl.trainers.ledger import Group, Ledger
from rl.trainers.report import Report
from rl.trainers.saved_groups import read_groups, write_groups
from rl.trainers.scheduler import RolloutScheduler


class RLTrainer:
    """Trains the policy of a session by what an algorithm makes of scored rollouts. ::

        prompts -> RolloutScheduler -> session.sample -> rewards -> Ledger -> algorithm -> session
                                          ^                                                  |
                                          +------------------- push <------------------------+

    If a model is lost, all goes back to the newest checkpoint; what is sampled and still within
    the bound stays.
    """

    def __init__(
        self,
        config: RLConfig,
        task: Task,
        session: Session,
        record: RunRecord,
        progress: Progress,
    ):
        self.config = config
        self.task = task
        self.session = session
        self.record = record
        self.progress = progress
        self.watch = session.watch
        self.changed = Signal()
        self.report = Report(config, record, progress, self.watch)
        self.ledger = Ledger(
            groups_per_step=config.rollout.prompts_per_step,
            max_staleness=config.rollout.max_staleness,
            updates_per_step=config.updates_per_step,
        )
        self.checkpoints = StepFolders(record.folder / config.trainer.checkpoint.folder)
        self.algorithm: Algorithm = config.algorithm.build(run=config)
        self.companions = Companions(config, session, record.folder / "reference", self.checkpoints)
        self.evaluation = Evaluation(config, task, session, record.folder / "unevaluated")
        self.scheduler = RolloutScheduler(config, task, session, self.changed, self.evaluate_if_due)
        self.step = 0
        """Steps completed."""
        self.is_training = False
        self.leaving = False
        self._saved = 0

    async def run(self) -> dict[str, object] | None:
        """Train from the newest checkpoint to the last step; return the run's summary.

        None if ``leave`` ended it.
        """
        while True:
            try:
                await self.start()
                sampling = self.scheduler.run(self.ledger, self.step)
                async with self.session.running(), background(sampling):
                    await self.train()
                    return None if self.leaving else await self.finish()
            except ActorFailure as failure:
                self.session.recover(failure)

    async def start(self) -> None:
        """Start what is not running, and go back to the newest checkpoint."""
        self.is_training = False  # nothing is lost by leaving at once
        await self.session.start()
        state, ignored = await self.session.load()
        for name in ignored:
            self.progress.note(f"ignored {name}: it is incomplete")
        self.step = self._saved = state.get("step", 0)
        keep = self.config.rollout.pipeline == "asynchronous"
        finished = await self.saved_groups() if state else {}
        self.ledger.restore(state.get("ledger", {}), finished, self.session.version, keep=keep)
        self.scheduler.restore(state.get("scheduler", {}))
        self.report.go_back(self.step, state.get("watchdog", {}))
        self.algorithm.restore(state.get("algorithm", {}))
        await self.companions.load(self.step, state.get("companions", {}))
        if self.step:
            self.progress.note(f"resumed after step {self.step}")
        await self.evaluate_what_was_left()
        self.report.plan(await self.session.connect())

    async def saved_groups(self) -> dict[int, Group]:
        """Groups of the checkpoint that the policy has loaded."""
        folder = self.session.trainer.loaded
        assert folder is not None, "a state comes from a checkpoint"
        return await asyncio.to_thread(read_groups, folder / ROLLOUTS)

    def save_groups(self, groups: dict[int, Group]) -> None:
        """Begin the folder of this step's checkpoint, which the trainer completes, with
        ``groups``.
        """
        path = self.checkpoints.path(self.step) / ROLLOUTS
        with failing_loudly(path):
            self.record.check()
            self.checkpoints.make(self.step)
            write_groups(path, groups)

    def losses(self) -> dict[str, object]:
        """Restarts, dropped prompts and lost groups, for the summary."""
        restarts = self.session.restarts
        total = sum(restarts.values())
        return {
            "restarts": total,
            **restarts,
            "dropped": dict(self.ledger.dropped),
            "lost": dict(self.session.rollouter.lost),
        }

    def leave(self) -> None:
        """Finish the step under way, save, and let ``run`` return; an evaluation is left for the
        next attempt.
        """
        self.leaving = True
        self.changed.notify()

    async def train(self) -> None:
        """Step after step on what the ledger gives, until all are done or the run is to be left."""
        self.is_training = True
        self.watch.lap()
        async with background(self.report.look_for_stalls()):
            while self.step < self.config.steps and (chunk := await self.take()):
                await self.learn(chunk)
                await self.keep_if_due()
                await self.checkpoint_if_due()
        await self.checkpoint()
        await self.changed.until(lambda: self.leaving or self.scheduler.is_done)
        if not self.leaving:
            await self.session.settle()

    async def learn(self, chunk: list[Group]) -> None:
        """Take a step on ``chunk`` and the rest of the batch as it finishes; start the push."""
        groups = list[Group]()
        staleness = Counter[int]()
        updates = list[Metrics]()
        while chunk:
            staleness += self.staleness(chunk)
            with self.watch.span("train"):
                rollouts = [*chain.from_iterable(chunk)]
                batch = await self.algorithm.prepare(self.session, rollouts)
            *earlier, last = self.algorithm.minibatches(batch, self.step)
            for minibatch in earlier:
                await self.algorithm.accumulate(self.session, minibatch)
                updates.append(await self.algorithm.update(self.session))
            await self.algorithm.accumulate(self.session, last)
            groups += chunk
            chunk = await self.take() if self.ledger.lacks else []
        updates.append(await self.algorithm.update(self.session))
        with self.watch.span("train"):
            metrics = dict(Metrics.merged(updates)) | self.algorithm.finish()
            await self.companions.refresh(self.step + 1)
        self.step += 1
        self.session.start_push()
        ledger = self.ledger.stepped(self.session.version)
        self.scheduler.stepped(self.step)
        row = (
            {"step": self.step, "policy_version": self.session.version}
            | metrics
            | self.session.push_metrics
            | self.session.restarts
        )
        self.report.step(row, updates, groups, ledger, staleness)

    async def take(self) -> list[Group]:
        """Return the next chunk of the batch once it has finished; [] if the run is left before."""
        rollout = self.config.rollout
        chunk = list[Group]()

        def taken() -> bool:
            if self.leaving and self.ledger.lacks == rollout.prompts_per_step:
                return True
            chunk[:] = self.ledger.take(-(-rollout.prompts_per_step // rollout.stream_chunks))
            return bool(chunk)

        # In lockstep the trainer always waits.
        with self.watch.span("starved" if rollout.max_staleness else "wait"):
            await self.changed.until(taken)
        self.changed.notify()  # there is room for others
        return chunk

    def staleness(self, groups: list[Group]) -> Counter[int]:
        """Tokens by optimizer steps from their weights to the trainer's.

        Raises RunError above ``max_staleness``.
        """
        versions = Counter(
            chain.from_iterable(each.versions.tolist() for group in groups for each in group)
        )
        now = self.session.version
        oldest = min(versions)
        bound = self.config.rollout.max_staleness * self.config.updates_per_step
        if now - oldest > bound:
            raise RunError(f"a token of policy version {oldest} reached version {now}: {bound=}")
        return Counter({now - version: count for version, count in versions.items()})

    async def checkpoint_if_due(self) -> None:
        """Save every ``interval`` steps; what is left after the last one is no part of a step."""
        checkpoint = self.config.trainer.checkpoint
        if (
            checkpoint.enable
            and self.step < self.config.steps
            and self.step % checkpoint.interval == 0
        ):
            await self.checkpoint()

    async def checkpoint(self) -> None:
        """Save weights, optimizer and ledger as of this step, once nothing needs older weights any
        more.
        """
        if self.step in (self._saved, 0):
            return
        await self.changed.until(lambda: self.scheduler.may_cut(self.step))
        with self.watch.span("checkpoint"):
            state = {
                "step": self.step,
                "ledger": self.ledger.to_dict(),
                "scheduler": self.scheduler.to_dict(),
                "watchdog": self.report.to_dict(),
                "algorithm": self.algorithm.to_dict(),
                "companions": self.companions.to_dict(),
            }
            await asyncio.to_thread(self.save_groups, self.ledger.finished())
            await self.companions.save(self.step)
            await self.session.save(self.step, state)
        self._saved = self.step

    async def keep_if_due(self) -> None:
        """Keep the weights of this step until they are evaluated, whatever becomes of the run until
        then.
        """
        if self.evaluation.is_behind(self.step):
            with self.watch.span("checkpoint"):
                await self.evaluation.keep(self.step)

    async def evaluate_if_due(self, step: int) -> None:
        """Evaluate the weights after ``step``, which the generators hold, unless the run is left
        before that ends.
        """
        evaluated = self.report.evaluated
        if self.leaving or not self.evaluation.is_due(step, evaluated):
            return
        with self.watch.span("evaluate"):
            scores = await self.scores_unless_leaving()
        if scores is not None:  # generators may have been pulling newer weights as it began
            step = max(step, self.report.first_step(scores["eval/version_min"]))
            skipped = self.evaluation.count_due(step, evaluated) - 1
            self.report.evaluation(step, scores | {"eval/skipped": skipped})
            self.evaluation.forget(step)
        elif self.config.rollout.pipeline == "deterministic":  # where nothing else is in flight
            await self.session.abort()

    async def evaluate_what_was_left(self) -> None:
        """Make the evaluations that had not ended at the checkpoint, each from the weights that it
        was due for.
        """
        left = self.evaluation.left(self.step, self.report.evaluated)
        for step in left:
            await self.evaluation.bring_back(step, self.report.version_after(step))
            await self.session.connect()
            async with self.session.running():
                await self.evaluate_if_due(step)
            await self.session.start()  # a generator may have been lost meanwhile
        if left:
            await self.session.load()

    async def scores_unless_leaving(self) -> dict[str, float] | None:
        """Scores of the weights that the generators hold; None once the run is to be left."""
        return await self.changed.unless(lambda: self.leaving, self.evaluation.scores())

    async def finish(self) -> dict[str, object] | None:
        """Export, then evaluate; the summary, None where ``leave`` ended it.

        The summary is also written before the evaluation, which may fail.
        """
        self.evaluation.forget_all()
        self.progress.stage("exporting the policy")
        export = self.record.folder / "export"
        await self.session.export_hf(export)
        self.task.describe(export)
        summary: dict[str, object] = {
            "steps": self.step,
            "steps_learned": sum(row["trainer/updates"] > 0 for row in self.record.read_metrics()),
            "policy_version": self.session.version,
            **self.losses(),
            "policy_digest": await self.session.weight_digest(),
            "export": str(export),
        }
        self.record.write_summary(summary)
        self.progress.note(f"exported to {export}")
        self.progress.stage("evaluating on held-out prompts")
        scores = await self.scores_unless_leaving()
        if scores is None:
            return None
        if skipped := self.evaluation.count_due(self.step, self.report.evaluated):
            scores["eval/skipped"] = skipped
        return summary | scores | self.losses()
