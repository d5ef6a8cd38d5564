"""The RL loop: sample, score, compare, learn, push; as far ahead as staleness allows."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl.config import RLConfig
from rl.environments.task import Task
from rl.errors import RunError
from rl.observe.checkpoint_folders import ROLLOUTS
from rl.observe.rollout_files import Chunk, read_groups
from rl.rollout.rollout_metrics import rollout_metrics
from rl.trainers.algorithm import Step
from rl.trainers.auxiliary_models import AuxiliaryModels
from rl.trainers.evaluation import Evaluation, EvaluationSchedule, held_out_prompts
from rl.trainers.failed_call import FailedCall, lost_group
from rl.trainers.ledger import Group, Ledger
from rl.trainers.scheduler import RolloutScheduler
from rl.trainers.trainer import MetricCalculator, Trainer
from rl.trainers.trial import build_algorithm, build_task, try_task
from rl.types import Prompt, Rollout


class RLTrainer(Trainer[RLConfig]):
    """Trainer of a policy by reinforcement learning. An algorithm turns scored rollouts into
    optimizer steps. ::

        prompts -> RolloutScheduler -> session.sample -> rewards -> Ledger -> algorithm -> session
                                          ^                                                  |
                                          +------------------- push <------------------------+

    ``dataset_train`` is a :class:`Task`, by default the one that ``arguments.task`` builds;
    ``dataset_eval`` is a list of prompts, by default the held-out prompts of the task. If a model
    is lost, the run goes back to the newest checkpoint. Rollouts within the bound stay.
    """

    dataset_train: Task
    dataset_eval: list[Prompt]

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
        record = self.run.record
        self.ledger = Ledger(
            groups_per_step=config.rollout.prompts_per_step,
            max_staleness=config.rollout.max_staleness,
            updates_per_step=config.updates_per_step,
        )
        record.keep_tokenizer(self.dataset_train.tokenizer)
        self.auxiliary = AuxiliaryModels(
            config, self.session, record.folder / "reference", self.run.checkpoints
        )
        self.evaluation = Evaluation(config, self.dataset_train, self.session, self.dataset_eval)
        self.evaluations = EvaluationSchedule(config, self.evaluation, self.run)
        self.rollouts = RolloutScheduler(
            config,
            self.dataset_train,
            self.session,
            self.run.changed,
            self.evaluations.evaluate_if_due,
            self.algorithm.reward_key,
        )

    def work(self) -> list[Coroutine[Any, Any, None]]:
        return [self.rollouts.run(self.ledger, self.step)]

    async def restore(self, state: dict[str, Any]) -> None:
        keep = self.arguments.rollout.pipeline == "asynchronous"
        finished = await self.saved_groups() if state else {}
        self.ledger.restore(state.get("ledger", {}), finished, self.session.version, keep=keep)
        self.rollouts.restore(state.get("scheduler", {}))
        self.algorithm.restore(state.get("algorithm", {}))
        await self.auxiliary.load(self.step, state)

    async def saved_groups(self) -> dict[int, Group]:
        """Return the groups of the checkpoint that the policy has loaded."""
        folder = self.session.trainer.loaded
        assert folder is not None, "a state comes from a checkpoint"
        return await asyncio.to_thread(read_groups, folder / ROLLOUTS)

    async def may_save(self) -> bool:
        """Wait until nothing needs older weights than those of this step. Return False if an
        evaluation of older weights is repeated by the resumed run.
        """
        rollouts = self.rollouts
        await self.run.changed.until(lambda: rollouts.is_left or rollouts.may_save(self.step))
        return rollouts.may_save(self.step)

    async def snapshot(self) -> dict[str, Any]:
        finished = self.ledger.finished()
        state = {  # of the same moment: sampling goes on while files are written
            "ledger": self.ledger.to_dict(),
            "scheduler": self.rollouts.to_dict(),
            "algorithm": self.algorithm.to_dict(),
            "auxiliary": self.auxiliary.to_dict(),
        }
        await self.run.record.rollouts_written()  # a resume needs those of all steps before it
        checkpoints = self.run.checkpoints
        await asyncio.to_thread(self.run.record.write_groups, checkpoints, self.step, finished)
        await self.auxiliary.save(self.step)
        return state

    def facts(self) -> dict[str, Any]:
        """Return restarts, dropped prompts, lost groups and recovered episodes."""
        return super().facts() | {
            "dropped": dict(self.ledger.dropped),
            "lost": dict(self.session.rollouter.lost),
            "lost_episodes": dict(self.session.rollouter.lost_episodes),
            "recovered_episodes": dict(self.session.rollouter.recovered_episodes),
        }

    def failure_facts(self) -> dict[str, Any]:
        ledger = {"ledger": self.ledger.counts()} if self.run.is_open else {}
        return super().failure_facts() | ledger

    @property
    def is_in_step(self) -> bool:
        return self.ledger.room < self.arguments.rollout.prompts_per_step

    async def wind_down(self) -> None:
        await self.run.record.rollouts_written()
        await self.run.changed.until(lambda: self.leaving or self.rollouts.is_done)
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
        with self.run.step_calls():
            while chunk:
                staleness += self.staleness(chunk)
                await step.train([*chain.from_iterable(chunk)])
                groups += chunk
                chunk = await self.take() if self.ledger.room else []
            metrics = await step.end()
            with self.run.watch.span("train"):
                await self.auxiliary.refresh(self.step + 1)
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
            | rollout_metrics(groups, self.algorithm.reward_key)
            | {f"ledger/{name}": count for name, count in ledger.items() if isinstance(count, int)}
            | {
                "rollout/staleness_max": max(staleness),
                "rollout/staleness_mean": sum(age * n for age, n in staleness.items()) / tokens,
            }
        )
        await self.record_step(step, trained)
        samples = self.arguments.rollout.samples_per_prompt
        lost = {"episodes_lost_now": sum(samples - len(group) for group in groups)}
        states = {"step": self.step, **ledger, **lost, "staleness": staleness}
        self.run.record.append(self.run.record.ledger_path, states)
        self.report.step(row, step.updates, tokens=tokens)

    async def record_step(self, step: Step, version: int) -> None:
        """Begin to write the rollouts of the step, in a thread."""
        config = self.arguments.record
        if config.rollouts != "none":
            kept = config.kept(self.step, sum(len(chunk.rollouts) for chunk in step.chunks))
            await self.run.record.begin_rollouts(
                self.step, step.chunks, version=version, only=kept, max_bytes=config.max_bytes
            )

    def keep_failed(self, error: BaseException) -> FailedCall:
        """Write the group whose reward failed, or the rollouts of the failing step."""
        lost = lost_group(error)
        if lost is not None and lost.rollouts:
            return self.keep_rollouts("reward", [lost.rollouts])
        return super().keep_failed(error)

    def keep_step(self) -> FailedCall:
        return self.keep_rollouts("step", self.tried.begun)

    def keep_rollouts(
        self, call: Literal["step", "reward"], chunks: Sequence[Sequence[Rollout]]
    ) -> FailedCall:
        """Write the rollouts with which ``call`` failed, unless the config records none."""
        if self.arguments.record.rollouts == "none":
            return FailedCall(
                why_not="The rollouts of the failing call are not kept, since record.rollouts is "
                "'none'; a resumed run with --record.rollouts all keeps them if it fails again."
            )
        bare = [Chunk(rollouts=rollouts, columns={}) for rollouts in chunks]
        self.run.record.write_failed_rollouts(bare, version=self.session.version)
        return FailedCall(call)

    async def take(self) -> list[Group]:
        """Return the next chunk of the batch once it has finished; [] if the run is left before."""
        rollout = self.arguments.rollout
        chunk = list[Group]()

        def taken() -> bool:
            if self.leaving and self.ledger.room == rollout.prompts_per_step:
                return True
            chunk[:] = self.ledger.take(-(-rollout.prompts_per_step // rollout.stream_chunks))
            return bool(chunk)

        # In lockstep the trainer always waits.
        with self.run.watch.span("starved" if rollout.max_staleness else "wait"):
            await self.run.changed.until(taken)
        self.run.changed.notify()  # there is room for others
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
        return Counter(dict(zip((now - version for version in versions), counts, strict=True)))

    async def after_step(self) -> None:
        await self.evaluations.keep(self.step)

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return what :meth:`Evaluation.scores` measures.

        ``metric_calculator`` gets the groups of rollouts.
        """
        return await self.evaluation.scores(metric_calculator)

    async def final_scores(self) -> dict[str, float]:
        return await self.evaluations.final_scores(self.step)

    def describe(self, path: Path) -> None:
        self.dataset_train.describe(path)
