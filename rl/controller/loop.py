"""The loop: generate, score, compare, learn, push.

In lockstep each step's rollouts come from exactly the weights that it improves. With ``max_staleness`` 1
they come from the weights one step before, always: what is sampled depends on the config, not on timing.
"""

import asyncio

from rl.actors.generator import GeneratorMesh
from rl.actors.trainer import TrainerMesh
from rl.config import RunConfig
from rl.controller.evaluation import evaluate
from rl.controller.push import WeightPush
from rl.controller.state import RunState
from rl.errors import RunError
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.observe.spans import Stopwatch
from rl.rollout.batch import make_batch, rollout_metrics
from rl.rollout.rollouter import Rollouter
from rl.tasks.base import Task
from rl.types import Prompt, Rollout, Sampling
from rl.weights.digest import merge_digests, policy_digest


class Controller:
    """Runs the algorithm over two meshes that it knows only by their calls."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        trainer: TrainerMesh,
        generator: GeneratorMesh,
        record: RunRecord,
        progress: Progress,
    ):
        self.config, self.task = config, task
        self.trainer, self.generator = trainer, generator
        self.record, self.progress = record, progress
        self.state = RunState()
        self.watch = Stopwatch()
        self.push = WeightPush(config, trainer, [generator], self.watch)
        self.rollouter = Rollouter(task, generator.generate, seed=config.seed, watch=self.watch)
        self.sampling = Sampling(
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            stop_token_ids=task.stop_token_ids,
        )

    async def run(self) -> dict[str, object]:
        """Train from the newest checkpoint to the last step; returns the run's summary."""
        state, ignored = await self.trainer.load_checkpoint()
        for name in ignored:
            self.progress.note(f"ignored {name}: it is incomplete")
        self.state = RunState.from_dict(state)
        if self.config.rollout.max_staleness == 0:  # it may have been 1 when the checkpoint was saved
            self.state.forget_ahead()
        self.record.drop_after(self.state.step)
        if self.state.step:
            self.progress.note(f"resumed after step {self.state.step}")
        plan = await self.push.connect()
        (self.record.logs / "push.txt").write_text(plan)
        self.progress.note("push over " + ", ".join(plan.splitlines()[:2]).removeprefix("transport: "))
        self.push.begin()
        await self.push.arrive()

        self.watch.lap()
        while self.state.step < self.config.steps:
            groups = self.state.ahead or await self.sample(self.state.step)
            self.state.ahead, metrics = await asyncio.gather(self.sample_ahead(), self.learn(groups))
            self.state.step += 1
            self.report(groups, metrics)
            await self.checkpoint_if_due()

        await self.push.arrive()
        await self.push.settle()
        return await self.finish()

    async def sample(self, step: int) -> list[list[Rollout]]:
        """What is trained on after ``step`` steps, from the weights that were pushed last; nothing after all steps."""
        await self.push.arrive()
        if step == self.config.steps:
            return []
        return await self.rollouter.collect(
            self.next_prompts(), self.sampling, samples=self.config.rollout.samples_per_prompt
        )

    async def sample_ahead(self) -> list[list[Rollout]]:
        """With ``max_staleness`` 1, what the step after this one trains on; else nothing.

        Its weights are those of before this step, which is one step back for the next: never more, since
        the next step is not begun before the groups are there.
        """
        return await self.sample(self.state.step + 1) if self.config.rollout.max_staleness else []

    def next_prompts(self) -> list[Prompt]:
        """The next ``prompts_per_step`` of the stream."""
        first = self.state.next_ordinal
        self.state.next_ordinal += self.config.rollout.prompts_per_step
        return [self.task.prompt(ordinal) for ordinal in range(first, self.state.next_ordinal)]

    async def learn(self, groups: list[list[Rollout]]) -> dict[str, float]:
        """One optimizer step on the groups; the push of what it came to is begun."""
        algorithm = self.config.algorithm
        with self.watch.span("train"):
            batch = make_batch(groups, normalize_std=algorithm.normalize_std, reduction=algorithm.loss.reduction)
            staleness = self._staleness(groups)
            _, metrics = await self.trainer.forward_backward(
                batch, algorithm.loss, temperature=self.sampling.temperature
            )
        await self.push.settle()
        with self.watch.span("train"):
            metrics |= await self.trainer.optim_step()
        self.push.begin()
        return metrics | {"rollout/staleness_max": staleness}

    def _staleness(self, groups: list[list[Rollout]]) -> int:
        """Of the oldest token, in optimizer steps. Raises RunError above ``max_staleness``."""
        oldest = min(version for group in groups for rollout in group for version in rollout.completion.versions)
        staleness, bound = self.trainer.version - oldest, self.config.rollout.max_staleness
        if staleness > bound:
            raise RunError(f"a token of policy version {oldest} reached version {self.trainer.version}: {bound=}")
        return staleness

    async def checkpoint_if_due(self) -> None:
        """Save every ``interval`` steps and after the last."""
        checkpoint = self.config.trainer.checkpoint
        last = self.state.step == self.config.steps
        if last or (checkpoint.enable and self.state.step % checkpoint.interval == 0):
            with self.watch.span("checkpoint"):
                await self.trainer.save_checkpoint(self.state.step, self.state.to_dict())

    def report(self, groups: list[list[Rollout]], metrics: dict[str, float]) -> None:
        """Write and show what the step came to."""
        row: dict[str, float] = {"step": self.state.step, "policy_version": self.trainer.version}
        row |= rollout_metrics(groups) | metrics | self.push.metrics | self.watch.lap()
        tokens = sum(len(rollout.completion.tokens) for group in groups for rollout in group)
        row["tokens_per_s"] = tokens / row["timing/step"]
        rollouts = [rollout for group in groups for rollout in group]
        self.record.append_rollouts(self.state.step, rollouts[: self.config.rollout.recorded_per_step])
        self.record.append_metrics(row)
        self.progress.update(row)

    async def finish(self) -> dict[str, object]:
        """Evaluate and export; the summary."""
        self.progress.stage("evaluating on held-out prompts")
        scores = await evaluate(self.rollouter, self.task, self.config.evaluation, self.sampling)
        self.progress.stage("exporting the policy")
        export = self.record.folder / "export"
        await self.trainer.export_hf(export)
        if self.config.model.hf_path is None:  # else the export has the original files
            self.task.tokenizer.save_pretrained(export)
        return {
            "steps": self.state.step,
            "policy_version": self.trainer.version,
            **scores,
            "policy_digest": policy_digest(merge_digests(await self.trainer.weight_digests())),
            "export": str(export),
        }
