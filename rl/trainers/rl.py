"""The RL loop: sample, score, compare, learn, push; as far ahead as staleness allows."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import numpy as np

from rl.config import RLConfig
from rl.environments.task import Task
from rl.errors import RunError
from rl.observe.checkpoint_folders import ROLLOUTS
from rl.observe.rollout_files import read_groups
from rl.rollout.rollout_metrics import rollout_metrics
from rl.session.concurrency import background
from rl.trainers.auxiliary_models import AuxiliaryModels
from rl.trainers.evaluation import Evaluation, EvaluationSchedule, held_out_prompts
from rl.trainers.hooks import MetricCalculator
from rl.trainers.ledger import Group, Ledger
from rl.trainers.scheduler import RolloutScheduler
from rl.trainers.step import Step
from rl.trainers.trainer import Trainer
from rl.trainers.trial import build_algorithm, build_task, try_task
from rl.types import Prompt


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
        self.run.describe = self.dataset_train.describe
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
            lambda: self.run.last_step,
        )

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        async with background(self.rollouts.run(self.ledger, self.step)):
            yield
            await self.run.record.rollouts_written()
            await self.run.changed.until(lambda: self.leaving or self.rollouts.is_done)
            if not self.leaving:
                await self.session.settle()

    async def restore(self, state: dict[str, Any]) -> None:
        keep = self.arguments.rollout.pipeline == "asynchronous"
        finished = dict[int, Group]()
        if state:
            folder = self.session.trainer.loaded
            assert folder is not None, "a state comes from a checkpoint"
            finished = await asyncio.to_thread(read_groups, folder / ROLLOUTS)
        self.ledger.restore(state.get("ledger", {}), finished, self.session.version, keep=keep)
        self.rollouts.restore(state.get("scheduler", {}))
        self.algorithm.restore(state.get("algorithm", {}))
        await self.auxiliary.load(self.step, state)

    async def snapshot(self) -> dict[str, Any] | None:
        """Wait until nothing needs older weights than those of this step. Return None if an
        evaluation of older weights is repeated by the resumed run.
        """
        rollouts = self.rollouts
        await self.run.changed.until(lambda: rollouts.is_left or rollouts.may_save(self.step))
        if not rollouts.may_save(self.step):
            return None
        finished = self.ledger.finished()
        state = {  # of the same moment: sampling goes on while files are written
            "ledger": self.ledger.to_dict(),
            "scheduler": self.rollouts.to_dict(),
            "algorithm": self.algorithm.to_dict(),
            "auxiliary": self.auxiliary.to_dict(),
        }
        record = self.run.record
        with self.run.watch.span("checkpoint"):
            await record.rollouts_written()  # a resume needs those of all steps before it
            write = record.write_groups
            await asyncio.to_thread(write, self.run.checkpoints, self.step, finished)
            await self.auxiliary.save(self.step)
        return state

    def facts(self) -> dict[str, Any]:
        """Return the ledger's counts, dropped prompts, lost groups and recovered episodes."""
        return {
            "ledger": self.ledger.counts(),
            "dropped": dict(self.ledger.dropped),
            "lost": dict(self.session.rollouter.lost),
            "lost_episodes": dict(self.session.rollouter.lost_episodes),
            "recovered_episodes": dict(self.session.rollouter.recovered_episodes),
        }

    async def train_step(self) -> bool:
        chunk = await self.take()
        if chunk:
            await self.learn(chunk)
        return bool(chunk)

    async def learn(self, chunk: list[Group]) -> None:
        """Take a step on ``chunk`` and the rest of the batch as it finishes; start the push."""
        groups = list[Group]()
        sampled = 0
        staleness = Counter[int]()
        step = Step(self.algorithm, self.session, self.step)
        trained = self.session.version
        with self.run.step_calls(step.rollouts):
            while chunk:
                sampled += sum(map(len, chunk))
                chunk = [[rollout for rollout in group if not rollout.abstained] for group in chunk]
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
            | self.rollouts.take_figures(self.step)
            | rollout_metrics(groups, self.algorithm.reward_key)
            | {f"ledger/{name}": count for name, count in ledger.items() if isinstance(count, int)}
            | {
                "rollout/abstained": sampled - sum(map(len, groups)),
                "rollout/staleness_max": max(staleness),
                "rollout/staleness_mean": sum(age * n for age, n in staleness.items()) / tokens,
            }
        )
        record = self.arguments.record
        if record.rollouts != "none":
            await self.run.record.begin_rollouts(
                self.step,
                step.chunks,
                version=trained,
                only=record.kept(self.step, sum(len(chunk.rollouts) for chunk in step.chunks)),
                max_bytes=record.max_bytes,
            )
        lost = {"episodes_lost_now": self.arguments.sequences - sampled}
        states = {"step": self.step, **ledger, **lost, "staleness": staleness}
        self.run.record.append(self.run.record.ledger_path, states)
        self.report.step(row, step.updates, tokens=tokens)

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
        drawn = np.concatenate([rollout.versions for group in groups for rollout in group])
        versions, counts = (values.tolist() for values in np.unique(drawn, return_counts=True))
        now = self.session.version
        oldest = versions[0]
        bound = self.arguments.rollout.max_staleness * self.arguments.updates_per_step
        if now - oldest > bound:
            raise RunError(f"a token of policy version {oldest} reached version {now}: {bound=}")
        return Counter(dict(zip((now - version for version in versions), counts, strict=True)))

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """Number of batches that are sampled before the weights of a step are evaluated."""
        return self.arguments.rollout.max_staleness + 1

    async def between_steps(self) -> None:
        await self.evaluations.keep(self.step)

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return what :meth:`Evaluation.scores` measures.

        ``metric_calculator`` gets the groups of rollouts.
        """
        return await self.evaluations.scores(self.step, metric_calculator)
