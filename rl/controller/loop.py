"""The loop: sample, score, compare, learn, push; all of it side by side, as far as the staleness bound allows."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from rl.actors.generator import GeneratorMesh
from rl.actors.reward import RewardWorkers
from rl.actors.trainer import TrainerMesh
from rl.config import RunConfig
from rl.controller.evaluation import Evaluation
from rl.controller.fleet import Fleet, start_anew
from rl.controller.ledger import Group, Ledger
from rl.controller.push import WeightPush
from rl.controller.router import Router
from rl.controller.sampler import Sampler
from rl.controller.together import Signal, beside
from rl.controller.watchdog import Alarm, Watchdog
from rl.errors import ActorFailure, RunError
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.observe.spans import Stopwatch
from rl.rollout.batch import make_batch, rollout_metrics
from rl.rollout.rollouter import Rollouter
from rl.tasks.base import Task
from rl.types import Sampling
from rl.weights.digest import merge_digests, policy_digest


class Controller:
    """Runs the algorithm over meshes that it knows only by their calls. ::

        prompts ─► Sampler ─► Router ─► generators ─► rewards ─► Ledger ─► learn ─► trainer
                                            ▲                                         │
                                            └────────────── WeightPush ◄──────────────┘

    A generator that is lost comes back beside the loop (Fleet). With the trainer, all goes back to the newest
    checkpoint; what is sampled and still within the bound stays.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        trainer: TrainerMesh,
        make_generator: Callable[[int], GeneratorMesh],
        rewards: RewardWorkers,
        record: RunRecord,
        progress: Progress,
    ):
        self.config, self.task, self.trainer, self.rewards = config, task, trainer, rewards
        self.record, self.progress = record, progress
        self.watch, self.watchdog, changed = Stopwatch(), Watchdog(config.watchdog), Signal()
        rollout = config.rollout
        self.sampling = Sampling(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=task.stop_token_ids,
        )
        self.ledger = Ledger(groups_per_step=rollout.prompts_per_step, max_staleness=rollout.max_staleness)
        self.router, self.changed = Router(), changed
        self.push = WeightPush(config, trainer, self.watch, changed)
        self.fleet = Fleet(
            make_generator,
            self.router,
            self.push,
            count=config.generator.replicas,
            max_restarts=config.max_restarts,
            asked=record.folder / "replicas",
            say=progress.warn,
        )
        rollouter = Rollouter(rewards.score, seed=config.seed, watch=self.watch)
        self.evaluation = Evaluation(config.evaluation, task, rollouter, self.router, self.sampling)
        self.sampler = Sampler(
            config, task, self.sampling, rollouter, self.router, self.push, changed, self.evaluate_if_due
        )
        self.step = 0
        """Steps completed."""
        self.is_training = self.leaving = False
        self.restarts = self._lost = self._saved = 0

    async def run(self) -> dict[str, object] | None:
        """Train from the newest checkpoint to the last step; the run's summary, None where ``leave`` ended it."""
        while True:
            try:
                await self.start()
                async with beside(self.fleet.run(), self.push.run(), self.sample(), self.look_for_stalls()):
                    await self.train()
                    return None if self.leaving else await self.finish()
            except ActorFailure as failure:
                self.recover(failure)

    async def start(self) -> None:
        """Start what is not running, and go back to the newest checkpoint."""
        await asyncio.gather(start_anew(self.trainer), start_anew(self.rewards), self.fleet.start())
        state, ignored = await self.trainer.load_checkpoint()
        for name in ignored:
            self.progress.note(f"ignored {name}: it is incomplete")
        self.restore(state)
        if self.step:
            self.progress.note(f"resumed after step {self.step}")
        plan = await self.fleet.connect(self.step)
        (self.record.logs / "push.txt").write_text(plan)
        self.progress.note("push over " + ", ".join(plan.splitlines()[:2]).removeprefix("transport: "))

    def recover(self, failure: ActorFailure) -> None:
        """Go on after a mesh was lost, unless that happens again and again. Raises ``failure`` then."""
        self._lost += 1
        if not failure.is_lost or self._lost > self.config.max_restarts:
            raise failure
        self.restarts += 1
        self.progress.warn(f"{str(failure).splitlines()[0]}; going back to the newest checkpoint")

    def leave(self) -> None:
        """Finish the step under way, save, and let ``run`` return."""
        self.leaving = True
        self.changed.notify()

    async def sample(self) -> None:
        """Fill the ledger."""
        await self.sampler.run(self.ledger, self.step)

    async def train(self) -> None:
        """Step after step on what the ledger gives, until all are done or the run is to be left."""
        self.watch.lap()
        self.is_training = True
        while self.step < self.config.steps and (part := await self.take()):
            self.report(*await self.learn(part))
            await self.checkpoint_if_due()
        if self.leaving:
            await self.checkpoint()
        else:
            await self.push.arrive(self.step)
            await self.push.settle()

    async def learn(self, part: list[Group]) -> tuple[list[Group], dict[str, float], Counter[int]]:
        """One optimizer step, on a part of the batch and the rest as it finishes; the push of the result is begun.

        Returns the groups, metrics, and tokens by staleness.
        """
        algorithm, groups, staleness = self.config.algorithm, list[Group](), Counter[int]()
        while part:
            with self.watch.span("train"):
                batch = make_batch(part, normalize_std=algorithm.normalize_std, reduction=algorithm.loss.reduction)
                staleness += self.staleness(part)
                await self.trainer.forward_backward(batch, algorithm.loss, temperature=self.sampling.temperature)
            groups += part
            part = await self.take() if self.ledger.lacks else []
        await self.push.settle()
        with self.watch.span("train"):
            metrics = await self.trainer.optim_step()
        self.step += 1
        self.push.begin(self.step)
        return groups, metrics, staleness

    async def take(self) -> list[Group]:
        """The next part of the batch, as soon as it is there; nothing where the run is left before its first."""
        rollout, part = self.config.rollout, list[Group]()

        def taken() -> bool:
            if self.leaving and self.ledger.lacks == rollout.prompts_per_step:
                return True
            part[:] = self.ledger.take(-(-rollout.prompts_per_step // rollout.parts_per_step))
            return bool(part)

        with self.watch.span("starved" if rollout.max_staleness else "wait"):  # in lockstep it could not be otherwise
            await self.changed.until(taken)
        self.changed.notify()  # there is room for others
        return part

    def staleness(self, groups: list[Group]) -> Counter[int]:
        """Tokens by optimizer steps from their weights to the trainer's. Raises RunError above ``max_staleness``."""
        versions = Counter(version for group in groups for rollout in group for version in rollout.completion.versions)
        oldest, bound = min(versions), self.config.rollout.max_staleness
        if self.trainer.version - oldest > bound:
            raise RunError(f"a token of policy version {oldest} reached version {self.trainer.version}: {bound=}")
        return Counter({self.trainer.version - version: count for version, count in versions.items()})

    async def checkpoint_if_due(self) -> None:
        """Save every ``interval`` steps and after the last."""
        checkpoint = self.config.trainer.checkpoint
        if self.step == self.config.steps or (checkpoint.enable and self.step % checkpoint.interval == 0):
            await self.checkpoint()

    async def checkpoint(self) -> None:
        """Save weights, optimizer and ledger as of this step, once nothing needs older weights any more."""
        if self.step in (self._saved, 0):
            return
        await self.changed.until(lambda: self.sampler.may_cut(self.step))
        with self.watch.span("checkpoint"):
            state = {"step": self.step, "ledger": self.ledger.to_dict(), "watchdog": self.watchdog.to_dict()}
            await self.trainer.save_checkpoint(self.step, state)
        self._saved, self._lost = self.step, 0

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to what ``checkpoint`` saved; to the start from an empty dict."""
        self.step = self._saved = state.get("step", 0)
        keep = self.config.rollout.pipeline == "asynchronous"
        self.ledger.restore(state.get("ledger", {}), self.trainer.version, keep=keep)
        self.watchdog = Watchdog.from_dict(self.config.watchdog, state.get("watchdog", {}))
        self.record.drop_after(self.step)

    def report(self, groups: list[Group], metrics: dict[str, float], staleness: Counter[int]) -> None:
        """Write and show what the step came to."""
        row: dict[str, float] = {"step": self.step, "policy_version": self.trainer.version}
        row |= rollout_metrics(groups) | metrics | self.push.metrics | self.watch.lap()
        ledger = self.ledger.stepped(self.trainer.version)
        self.sampler.stepped()
        tokens = staleness.total()
        row |= {
            "rollout/staleness_max": max(staleness),
            "rollout/staleness_mean": sum(age * count for age, count in staleness.items()) / tokens,
            "tokens_per_s": tokens / row["timing/step"],
            "restarts/trainer": self.restarts,
            "restarts/generators": self.fleet.restarts,
            **{f"ledger/{name}": count for name, count in ledger.items() if isinstance(count, int)},
        }
        rollouts = [rollout for group in groups for rollout in group]
        first = self.step * self.config.rollout.recorded_per_step % len(rollouts)  # a mixture's tasks all have a turn
        recorded = [*rollouts[first:], *rollouts[:first]][: self.config.rollout.recorded_per_step]
        self.record.append_rollouts(self.step, recorded)
        self.record.append_ledger({"step": self.step, **ledger, "staleness": staleness})
        try:
            self.warn(self.watchdog.check(row))
        finally:  # an alarm that ends the run is in its metrics
            row |= self.watchdog.metrics
            self.record.append_metrics(row)
            self.progress.update(row)
        self.changed.notify()

    def warn(self, alarms: list[Alarm]) -> None:
        """Show what the watchdog has to say."""
        for alarm in alarms:
            self.progress.warn(alarm.text)

    async def evaluate_if_due(self, step: int) -> None:
        """Scores of the weights after ``step``, which the generators hold."""
        done = {row["step"] for row in self.record.read_evaluations()} | {0, self.config.steps}
        if self.evaluation.is_due(step) and step not in done:
            with self.watch.span("evaluate"):
                row = {"step": step, **await self.evaluation.scores()}
            self.record.append_evaluation(row)
            self.progress.evaluation(row)

    async def look_for_stalls(self) -> None:
        """For as long as the run goes on."""
        while True:
            await asyncio.sleep(1.0)
            self.warn(self.watchdog.stalled(self.watch.since_lap()))

    async def finish(self) -> dict[str, object]:
        """Evaluate and export; the summary."""
        self.progress.stage("evaluating on held-out prompts")
        scores = await self.evaluation.scores()
        self.progress.stage("exporting the policy")
        export = self.record.folder / "export"
        await self.trainer.export_hf(export)
        if self.config.model.hf_path is None:  # else the export has the original files
            self.task.tokenizer.save_pretrained(export)
        return {
            "steps": self.step,
            "policy_version": self.trainer.version,
            "restarts": self.restarts + self.fleet.restarts,
            **scores,
            "policy_digest": policy_digest(merge_digests(await self.trainer.weight_digests())),
            "export": str(export),
        }
