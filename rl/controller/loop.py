"""The loop: sample, score, compare, learn, push; all of it side by side, as far as the staleness
bound allows.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain

from rl.actors.generator import GeneratorMesh
from rl.actors.group import ensure_running
from rl.actors.reward import RewardWorkers
from rl.config import RLConfig
from rl.controller.concurrency import Signal, background
from rl.controller.dispatch import Dispatch
from rl.controller.evaluation import Evaluation
from rl.controller.fleet import Fleet
from rl.controller.learner import Learner
from rl.controller.ledger import Group, Ledger
from rl.controller.push import WeightPush
from rl.controller.report import Report
from rl.controller.router import Router
from rl.controller.sampler import Sampler
from rl.controller.saved_groups import read_groups, write_groups
from rl.errors import ActorFailure, RunError
from rl.observe.metrics import Metrics
from rl.observe.progress import Progress
from rl.observe.record import RunRecord, failing_loudly
from rl.observe.spans import Stopwatch
from rl.rollout.rollouter import Rollouter
from rl.step_folders import ROLLOUTS, StepFolders
from rl.tasks.base import Task
from rl.types import Batch
from rl.weights.digest import merge_digests, policy_digest


class Controller:
    """Runs the algorithm over meshes that it knows only by their calls. ::

        prompts ─► Sampler ─► Router ─► generators ─► rewards ─► Ledger ─► learn ─► trainer
                                            ▲                                         │
                                            └────────────── WeightPush ◄──────────────┘

    A generator that is lost comes back beside the loop (Fleet). With the trainer, all goes back to
    the newest checkpoint; what is sampled and still within the bound stays.
    """

    def __init__(
        self,
        config: RLConfig,
        task: Task,
        dispatch: Dispatch,
        make_generator: Callable[[int], GeneratorMesh],
        rewards: RewardWorkers,
        record: RunRecord,
        progress: Progress,
    ):
        self.config = config
        self.task = task
        self.dispatch = dispatch
        self.rewards = rewards
        self.record = record
        self.progress = progress
        generating = partial(dispatch.resident, "generator", "model")
        self.watch = Stopwatch()
        self.changed = Signal()
        self.router = Router(generating)
        self.report = Report(config, record, progress, self.watch)
        self.ledger = Ledger(
            groups_per_step=config.rollout.prompts_per_step,
            max_staleness=config.rollout.max_staleness,
            updates_per_step=config.updates_per_step,
        )
        self.checkpoints = StepFolders(record.folder / config.trainer.checkpoint.folder)
        self.learner = Learner(config, dispatch, record.folder / "reference", self.checkpoints)
        self.push = WeightPush(config, dispatch, self.watch, self.changed, progress.warn)
        self.fleet = Fleet(
            config,
            make_generator,
            self.router,
            self.push,
            record.folder / "replicas",
            progress.warn,
            generating,
        )
        dispatch.share("generator", self.fleet)
        self.rollouter = Rollouter(
            rewards.score, seed=config.seed, watch=self.watch, warn=progress.warn
        )
        unevaluated = record.folder / "unevaluated"
        self.evaluation = Evaluation(
            config, task, self.rollouter, self.router, dispatch, unevaluated
        )
        self.sampler = Sampler(
            config, task, self.rollouter, self.router, self.push, self.changed, self.evaluate_if_due
        )
        self.step = 0
        """Steps completed."""
        self.is_training = self.leaving = False
        self.restarts = self._lost = self._saved = 0

    async def run(self) -> dict[str, object] | None:
        """Train from the newest checkpoint to the last step; the run's summary, None where
        ``leave`` ended it.
        """
        while True:
            try:
                await self.start()
                sampling = self.sampler.run(self.ledger, self.step)
                async with background(
                    self.fleet.run(), self.push.run(), sampling, self.look_after_models()
                ):
                    await self.train()
                    return None if self.leaving else await self.finish()
            except ActorFailure as failure:
                self.recover(failure)

    async def start(self) -> None:
        """Start what is not running, and go back to the newest checkpoint."""
        self.is_training = False  # nothing is lost by leaving at once
        async with (
            background() as work
        ):  # one that fails ends the others, so that all can be started anew
            for start in (self.dispatch.start(), ensure_running(self.rewards), self.fleet.start()):
                work.create_task(start)
        state, ignored = await self.dispatch.load_checkpoint("policy")
        for name in ignored:
            self.progress.note(f"ignored {name}: it is incomplete")
        self.step = self._saved = state.get("step", 0)
        keep = self.config.rollout.pipeline == "asynchronous"
        finished = await self.saved_groups() if state else {}
        self.ledger.restore(state.get("ledger", {}), finished, self.version, keep=keep)
        self.sampler.restore(state.get("sampler", {}))
        self.report.go_back(self.step, state.get("watchdog", {}))
        await self.learner.load(self.step, state.get("learner", {}))
        if self.step:
            self.progress.note(f"resumed after step {self.step}")
        await self.evaluate_what_was_left()
        self.report.plan(await self.fleet.connect(self.step))

    async def saved_groups(self) -> dict[int, Group]:
        """Groups of the checkpoint that the policy has loaded."""
        folder = self.dispatch.policy.loaded
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

    @property
    def version(self) -> int:
        """Of the policy's weights."""
        return self.dispatch.policy.version

    @property
    def all_restarts(self) -> dict[str, int]:
        """How often meshes were started again, over the run, by role."""
        return {
            "restarts/trainer": self.restarts,
            "restarts/generators": self.fleet.restarts,
            "restarts/reward": self.rewards.restarts,
        }

    def losses(self) -> dict[str, object]:
        """Restarts, dropped prompts and lost groups, for the summary."""
        restarts = self.all_restarts
        total = sum(restarts.values())
        return {
            "restarts": total,
            **restarts,
            "dropped": dict(self.ledger.dropped),
            "lost": dict(self.rollouter.lost),
        }

    async def look_after_models(self) -> None:
        """Raise how the trainer or another model was lost, also where nobody asks it anything."""
        raise await self.dispatch.failed()

    def recover(self, failure: ActorFailure) -> None:
        """Go on after a model was lost, or anything while starting; raises ``failure`` where that
        is no use.
        """
        self._lost += 1
        if not failure.is_lost or self._lost > self.config.max_restarts:
            raise failure
        self.restarts += 1
        self.progress.warn(f"{str(failure).splitlines()[0]}; going back to the newest checkpoint")

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
            while self.step < self.config.steps and (part := await self.take()):
                await self.learn(part)
                await self.keep_if_due()
                await self.checkpoint_if_due()
        await self.checkpoint()
        await self.changed.until(lambda: self.leaving or self.sampler.is_done)
        if not self.leaving:
            await self.push.settle()

    async def learn(self, part: list[Group]) -> None:
        """Learn from a part of the batch, and from the rest as it finishes; the push of what comes
        of it is begun.
        """
        groups = list[Group]()
        staleness = Counter[int]()
        updates = list[Metrics]()
        while part:
            staleness += self.staleness(part)
            with self.watch.span("train"):
                batch = await self.learner.prepare(part)
            *earlier, last = self.learner.minibatches(batch, self.step)
            for mini in earlier:
                await self.accumulate(mini)
                updates.append(await self.update())
            await self.accumulate(last)
            groups += part
            part = await self.take() if self.ledger.lacks else []
        updates.append(await self.update())
        with self.watch.span("train"):
            metrics = dict(Metrics.merged(updates)) | await self.learner.finish(self.step + 1)
        self.step += 1
        self.push.begin(self.step)
        ledger = self.ledger.stepped(self.version)
        self.sampler.stepped()
        row = (
            {"step": self.step, "policy_version": self.version}
            | metrics
            | self.push.metrics
            | self.all_restarts
        )
        self.report.step(row, updates, groups, ledger, staleness)

    async def accumulate(self, batch: Batch) -> None:
        with self.watch.span("train"):
            await self.learner.accumulate(batch)

    async def update(self) -> Metrics:
        """One optimizer step, once nothing reads the weights any more."""
        await self.push.settle()
        with self.watch.span("train"):
            return await self.learner.update()

    async def take(self) -> list[Group]:
        """The next part of the batch, as soon as it is there; nothing where the run is left before
        its first.
        """
        rollout = self.config.rollout
        part = list[Group]()

        def taken() -> bool:
            if self.leaving and self.ledger.lacks == rollout.prompts_per_step:
                return True
            part[:] = self.ledger.take(-(-rollout.prompts_per_step // rollout.stream_chunks))
            return bool(part)

        with self.watch.span(
            "starved" if rollout.max_staleness else "wait"
        ):  # in lockstep it could not be otherwise
            await self.changed.until(taken)
        self.changed.notify()  # there is room for others
        return part

    def staleness(self, groups: list[Group]) -> Counter[int]:
        """Tokens by optimizer steps from their weights to the trainer's.

        Raises RunError above ``max_staleness``.
        """
        versions = Counter(
            chain.from_iterable(each.versions.tolist() for group in groups for each in group)
        )
        now = self.version
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
        await self.changed.until(lambda: self.sampler.may_cut(self.step))
        with self.watch.span("checkpoint"):
            state = {
                "step": self.step,
                "ledger": self.ledger.to_dict(),
                "sampler": self.sampler.to_dict(),
                "watchdog": self.report.to_dict(),
            }
            await asyncio.to_thread(self.save_groups, self.ledger.finished())
            await self.learner.save(self.step, state)
        self._saved = self.step
        self._lost = 0

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
            await self.fleet.abort()

    async def evaluate_what_was_left(self) -> None:
        """Make the evaluations that had not ended at the checkpoint, each from the weights that it
        was due for.
        """
        left = self.evaluation.left(self.step, self.report.evaluated)
        for step in left:
            await self.evaluation.bring_back(step, self.report.version_after(step))
            await self.fleet.connect(step)
            async with background(self.fleet.run(), self.push.run(), self.look_after_models()):
                await self.evaluate_if_due(step)
            await self.fleet.start()  # one may have been lost meanwhile
        if left:
            await self.dispatch.load_checkpoint("policy")

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
        await self.dispatch.export_hf("policy", export)
        self.task.describe(export)
        summary: dict[str, object] = {
            "steps": self.step,
            "steps_learned": sum(row["trainer/updates"] > 0 for row in self.record.read_metrics()),
            "policy_version": self.version,
            **self.losses(),
            "policy_digest": policy_digest(
                merge_digests(await self.dispatch.policy.weight_digests())
            ),
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
