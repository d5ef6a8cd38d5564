"""The RL loop: sample, score, compare, learn, push; as far ahead as staleness allows."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl.config import RLConfig
from rl.disk import replace_folder
from rl.errors import RunError
from rl.observe.record import failing_loudly
from rl.observe.rollouts import Chunk
from rl.rollout.metrics import rollout_metrics
from rl.session.config import SessionConfig
from rl.step_folders import ROLLOUTS
from rl.tasks.base import Task
from rl.trainers.attempt import Again, lost_group
from rl.trainers.companions import Companions
from rl.trainers.evaluation import Evaluation, held_out_prompts
from rl.trainers.ledger import Group, Ledger
from rl.trainers.life_cycle import MetricCalculator
from rl.trainers.saved_groups import read_groups, write_groups
from rl.trainers.scheduler import RolloutScheduler, sampling_of
from rl.trainers.start import build_algorithm, build_task, try_task
from rl.trainers.step import Step
from rl.trainers.trainer import Trainer
from rl.types import Prompt, Rollout


class RLTrainer(Trainer[RLConfig]):
    """Trainer of a policy by reinforcement learning. An algorithm turns scored rollouts into
    optimizer steps. ::

        prompts -> RolloutScheduler -> session.sample -> rewards -> Ledger -> algorithm -> session
                                          ^                                                  |
                                          +------------------- push <------------------------+

    ``dataset_train`` is a :class:`rl.tasks.base.Task`, by default the one that ``arguments.task``
    builds; ``dataset_eval`` is a list of prompts, by default the held-out prompts of the task. If
    a model is lost, the run goes back to the newest checkpoint. Rollouts within the bound stay.
    """

    dataset_train: Task
    dataset_eval: list[Prompt]

    def configure_model(self) -> SessionConfig:
        return self.arguments.session()

    def configure_dataloaders(self) -> None:
        self.algorithm = build_algorithm(self.arguments)
        if self.dataset_train is None:
            self.dataset_train = build_task(self.arguments)
        try_task(self.arguments, self.dataset_train)
        if self.dataset_eval is None:
            self.dataset_eval = held_out_prompts(self.arguments.evaluation, self.dataset_train)

    def configure_functions(self) -> None:
        self.task = self.arguments.task

    def assemble(self) -> None:
        config = self.arguments
        folder = self.record.folder
        self.ledger = Ledger(
            groups_per_step=config.rollout.prompts_per_step,
            max_staleness=config.rollout.max_staleness,
            updates_per_step=config.updates_per_step,
        )
        self.keep_tokenizer(folder / "tokenizer")
        self.companions = Companions(config, self.session, folder / "reference", self.checkpoints)
        self.evaluation = Evaluation(
            config,
            self.dataset_eval,
            sampling_of(config.rollout, self.dataset_train),
            self.session,
            folder / "unevaluated",
        )
        self.rollouts = RolloutScheduler(
            config,
            self.dataset_train,
            self.session,
            self.changed,
            self.evaluate_if_due,
            self.algorithm.seen,
        )

    def keep_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer once, so that the run folder can be read without the model."""
        if folder.is_dir():
            return
        partial = folder.with_name("tokenizer.partial")
        with failing_loudly(folder):
            self.record.check()
            self.dataset_train.tokenizer.save_pretrained(partial)
            replace_folder(folder, partial)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        return [self.rollouts.run(self.ledger, self.step)]

    async def restore(self, state: dict[str, Any]) -> None:
        keep = self.arguments.rollout.pipeline == "asynchronous"
        finished = await self.saved_groups() if state else {}
        self.ledger.restore(state.get("ledger", {}), finished, self.session.version, keep=keep)
        self.rollouts.restore(state.get("scheduler", {}))
        self.algorithm.restore(state.get("algorithm", {}))
        await self.companions.load(self.step, state.get("companions", {}))
        await self.evaluate_what_was_left()

    async def snapshot(self) -> dict[str, Any]:
        finished = self.ledger.finished()
        state = {  # of the same moment: sampling goes on while files are written
            "ledger": self.ledger.to_dict(),
            "scheduler": self.rollouts.to_dict(),
            "algorithm": self.algorithm.to_dict(),
            "companions": self.companions.to_dict(),
        }
        await self.record.rollouts_written()  # a resume needs those of all steps before it
        await asyncio.to_thread(self.save_groups, finished)
        await self.companions.save(self.step)
        return state

    async def saved_groups(self) -> dict[int, Group]:
        """Return the groups of the checkpoint that the policy has loaded."""
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

    async def save_checkpoint(self) -> None:
        """Save once nothing needs weights older than those of this step any more."""
        if self.step not in (self._saved, 0):
            await self.changed.until(lambda: self.rollouts.may_cut(self.step))
        await super().save_checkpoint()

    def facts(self) -> dict[str, Any]:
        """Return restarts, dropped prompts, lost groups and recovered episodes."""
        return super().facts() | {
            "dropped": dict(self.ledger.dropped),
            "lost": dict(self.session.rollouter.lost),
            "lost_episodes": dict(self.session.rollouter.lost_episodes),
            "recovered_episodes": dict(self.session.rollouter.recovered_episodes),
        }

    def whereabouts(self) -> dict[str, Any]:
        ledger = {"ledger": self.ledger.counts()} if self.is_open else {}
        return super().whereabouts() | ledger

    @property
    def is_in_step(self) -> bool:
        return self.ledger.lacks < self.arguments.rollout.prompts_per_step

    async def wind_down(self) -> None:
        await self.record.rollouts_written()
        await self.changed.until(lambda: self.leaving or self.rollouts.is_done)
        if not self.leaving:
            await self.session.settle()

    async def train_step(self) -> bool:
        chunk = await self.take()
        if chunk:
            await self.learn(chunk)
        return bool(chunk)

    async def learn(self, chunk: list[Group]) -> None:
        """Take a step on ``chunk`` and the rest of the batch as it finishes; start the push."""
        groups = list[Group]()
        staleness = Counter[int]()
        self.tried = step = Step(self.algorithm, self.session, self.step)
        trained = self.session.version
        with self.attempt.step():
            while chunk:
                staleness += self.staleness(chunk)
                await step.train([*chain.from_iterable(chunk)])
                groups += chunk
                chunk = await self.take() if self.ledger.lacks else []
            metrics = await step.end()
            with self.watch.span("train"):
                await self.companions.refresh(self.step + 1)
        self.step += 1
        self.session.publish()
        ledger = self.ledger.stepped(self.session.version)
        self.rollouts.stepped(self.step)
        tokens = staleness.total()
        row = (
            {"step": self.step, "policy_version": self.session.version}
            | metrics
            | self.session.push_metrics
            | self.session.restarts
            | dict(self.session.take_generator_load())
            | rollout_metrics(groups, self.algorithm.seen)
            | {f"ledger/{name}": count for name, count in ledger.items() if isinstance(count, int)}
            | {
                "rollout/staleness_max": max(staleness),
                "rollout/staleness_mean": sum(age * n for age, n in staleness.items()) / tokens,
            }
        )
        await self.record_step(step, trained)
        samples = self.arguments.rollout.samples_per_prompt
        lost = {"episodes_lost_now": sum(samples - len(group) for group in groups)}
        self.record.append_ledger({"step": self.step, **ledger, **lost, "staleness": staleness})
        self.report.step(row, step.updates, tokens=tokens)

    async def record_step(self, step: Step, version: int) -> None:
        """Begin to write the rollouts of the step, in a thread.

        A sample begins at another place each step, so that all tasks of a mixture appear.
        """
        config = self.arguments.record
        if config.rollouts == "none":
            return
        count = sum(len(chunk.rollouts) for chunk in step.chunks)
        kept = None
        if config.rollouts == "sample":
            first = self.step * config.sample
            kept = sorted((first + n) % count for n in range(min(config.sample, count)))
        await self.record.begin_rollouts(
            self.step, step.chunks, version=version, only=kept, max_bytes=config.max_bytes
        )

    async def record_evaluation(self, step: int) -> None:
        """Write the rollouts of the newest evaluation, which was of the weights after ``step``."""
        chunks = self.evaluation.take_rollouts()
        config = self.arguments.record
        if chunks and config.rollouts != "none":
            await self.record.write_evaluated(step, chunks, max_bytes=config.max_bytes)

    def keep_failed(self, error: BaseException) -> Again:
        """Keep the group whose reward failed, or the rollouts of the failing step."""
        lost = lost_group(error)
        if lost is not None and lost.rollouts:
            return self.keep_rollouts("reward", [lost.rollouts])
        return super().keep_failed(error)

    def keep_step(self) -> Again:
        return self.keep_rollouts("step", self.tried.begun)

    def keep_rollouts(
        self, call: Literal["step", "reward"], chunks: Sequence[Sequence[Rollout]]
    ) -> Again:
        """Write the rollouts with which ``call`` failed, unless the config records none."""
        if self.arguments.record.rollouts == "none":
            return Again(
                why_not="The rollouts of the failing call are not kept, since record.rollouts is "
                "'none'; a resumed run with --record.rollouts all keeps them if it fails again."
            )
        bare = [Chunk(rollouts=rollouts, columns={}) for rollouts in chunks]
        self.record.write_failed_rollouts(bare, version=self.session.version)
        return Again(call)

    async def take(self) -> list[Group]:
        """Return the next chunk of the batch once it has finished; [] if the run is left before."""
        rollout = self.arguments.rollout
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
        """Return the number of tokens by staleness: the number of optimizer steps between the
        weights that drew the token and the trainer's weights.

        Raises RunError above ``max_staleness``.
        """
        drawn = np.concatenate([each.versions for group in groups for each in group])
        versions, counts = (each.tolist() for each in np.unique(drawn, return_counts=True))
        now = self.session.version
        oldest = versions[0]
        bound = self.arguments.rollout.max_staleness * self.arguments.updates_per_step
        if now - oldest > bound:
            raise RunError(f"a token of policy version {oldest} reached version {now}: {bound=}")
        ages = (now - version for version in versions)
        return Counter(dict(zip(ages, counts, strict=True)))

    async def after_step(self) -> None:
        """Keep the weights of this step on disk until they are evaluated."""
        if self.evaluation.is_behind(self.step):
            with self.watch.span("checkpoint"):
                await self.evaluation.keep(self.step)

    async def evaluate_if_due(self, step: int) -> None:
        """Evaluate the weights after ``step``, which the generators hold, unless the run is left
        before the evaluation ends.
        """
        evaluated = self.report.evaluated
        if self.leaving or not self.evaluation.is_due(step, evaluated):
            return
        if step == 0:
            self.progress.stage("evaluating the initial weights")
        with self.watch.span("evaluate"):
            scores = await self.scores_unless_leaving()
        if scores is not None:  # generators may have been pulling newer weights as it began
            step = max(step, self.report.first_step(scores["eval/version_min"]))
            skipped = max(0, self.evaluation.count_due(step, evaluated) - 1)
            await self.record_evaluation(step)  # first, so that a kill in between repeats both
            self.report.evaluation(step, scores | {"eval/skipped": skipped})
            self.evaluation.forget(step)
        elif self.arguments.rollout.pipeline == "deterministic":  # where nothing else is in flight
            await self.session.abort()

    async def evaluate_what_was_left(self) -> None:
        """Repeat the evaluations that had not ended when the checkpoint was written.

        Each evaluation uses the weights that were kept for it. Afterwards the generators have the
        weights of the checkpoint again.
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

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return what :meth:`Evaluation.scores` measures.

        ``metric_calculator`` gets the groups of rollouts.
        """
        return await self.evaluation.scores(metric_calculator)

    async def finish(self) -> dict[str, Any] | None:
        self.evaluation.forget_all()
        summary = await super().finish()
        if summary is not None:
            await self.record_evaluation(self.step)
        skipped = self.evaluation.count_due(self.step, self.report.evaluated)
        if summary is not None and skipped:
            summary["eval/skipped"] = skipped
        return summary

    def describe(self, path: Path) -> None:
        self.dataset_train.describe(path)
