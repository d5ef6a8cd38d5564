"""Evaluation on held-out prompts: greedy, and pass@k."""

import asyncio
import dataclasses
import math
from functools import partial

from rl.config import EvaluationConfig, RLConfig, SamplingRunConfig
from rl.environments.task import Task
from rl.errors import ConfigError, GroupLost
from rl.metrics import Metrics
from rl.observe.rollout_files import Chunk
from rl.rollout.prompts import eval_prompts
from rl.session.concurrency import background
from rl.session.session import Session
from rl.trainers.hooks import MetricCalculator
from rl.trainers.ledger import Group
from rl.trainers.run import Run
from rl.types import Completion, GenerationRequest, Prompt, Sampling


class Evaluation:
    """Evaluation of the policy on held-out prompts. Its seeds are of a separate stream, and its
    samples are of the whole vocabulary, whatever the cuts of the rollouts.

    - The prompts are cut into shares, at least one for each replica. An engine can run all requests
      of a share at once. A replica gets one share at a time, so the number of prompts does not
      lengthen a call.
    - In a deterministic pipeline a replica answers a share alone and without cached prefixes, as in
      training. So the scores depend on the config and the weights alone.
    """

    def __init__(
        self,
        config: SamplingRunConfig,
        task: Task,
        session: Session,
        prompts: list[Prompt] | None = None,
    ):
        """``prompts`` are by default the held-out prompts of ``task``."""
        self._config = config.evaluation
        self.prompts = held_out_prompts(config.evaluation, task) if prompts is None else prompts
        """Held-out prompts; without any, there are no scores."""
        sampling = config.rollout.sampling(task.stop_token_ids)
        self._sampling = dataclasses.replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
        self._session = session
        self._replicas = config.generator.replicas
        self._at_once = config.generator.max_running_requests
        self._asking = asyncio.Semaphore(self._replicas)
        self._in_order = config.rollout.pipeline == "deterministic"
        self.rollouts: list[Chunk] = []
        """Rollouts that the newest scores are of: greedy completions, and then, if there are any,
        sampled ones."""

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return ``eval/exact_match`` of greedy completions. Of k samples of each prompt,
        ``eval/mean@k`` is the share that is correct, and ``eval/pass@k`` the share of prompts that
        one of them solves. ``eval/reward/NAME`` is a metric of the task's scores of greedy
        completions. ``eval/TASK/…`` are the same of each task of a mixture.

        ``eval/version_min`` and ``eval/version_max`` are the oldest and the newest policy version
        that drew a token. A prompt with a failed reward counts as not solved, and
        ``eval/lost`` counts these failures. Rewards that abstain are not in the mean. Empty if
        ``config.prompts`` is 0.
        """
        if not self.prompts:
            return {}
        greedy = dataclasses.replace(self._sampling, temperature=0.0)
        groups = await self._ask(greedy, 1, "eval/greedy")
        chunks = [_chunk(groups)]
        sampled: list[Group] = []
        if samples := self._config.samples:
            sampled = await self._ask(self._sampling, samples, "eval/sampled")
            chunks.append(_chunk(sampled))
        scores: dict[str, float] = {}
        for task in ["", *sorted({prompt.task for prompt in self.prompts} - {""})]:
            scores |= self._scores_of(task, groups, sampled)
        groups += sampled
        scores["eval/lost"] = float(len(self.prompts) * len(chunks) - len(groups))
        versions = {
            version
            for group in groups
            for rollout in group
            for version in rollout.versions.tolist()
        }
        scores["eval/version_min"] = min(versions, default=math.nan)
        scores["eval/version_max"] = max(versions, default=math.nan)
        if metric_calculator is not None:
            scores |= {f"eval/{name}": value for name, value in metric_calculator(groups).items()}
        self.rollouts = chunks
        return scores

    def _scores_of(self, task: str, greedy: list[Group], sampled: list[Group]) -> dict[str, float]:
        """Return the scores of the prompts of ``task``; of all prompts if it is empty."""
        count = sum(task in ("", prompt.task) for prompt in self.prompts)
        greedy, sampled = (
            [group for group in groups if task in ("", group[0].prompt.task)]
            for groups in (greedy, sampled)
        )
        merged = Metrics.merged(Metrics(group[0].metrics) for group in greedy)
        rewards = [group[0].reward for group in greedy if not group[0].abstained]
        scores = {
            "prompts": float(count),
            "exact_match": sum(_correct(greedy)) / count,
            "reward_mean": sum(rewards) / max(len(rewards), 1),
            **{f"reward/{name}": merged[name] for name in merged if name != "correct"},
        }
        if samples := self._config.samples:
            scores[f"pass@{samples}"] = sum(map(bool, _correct(sampled))) / count
            scores[f"mean@{samples}"] = sum(_correct(sampled)) / (count * samples)
        prefix = f"eval/{task}" if task else "eval"
        return {f"{prefix}/{name}": value for name, value in scores.items()}

    async def _ask(self, sampling: Sampling, samples: int, stream: str) -> list[Group]:
        """Return scored samples of each prompt, in order, without prompts with a failed reward."""
        size = min(-(-len(self.prompts) // self._replicas), max(1, self._at_once // samples))
        shares = [self.prompts[first : first + size] for first in range(0, len(self.prompts), size)]
        collect = partial(
            self._session.rollouter.collect, samples=samples, stream=stream, generate=self._in_turn
        )
        async with background() as work:
            answers = [work.create_task(collect(share, sampling)) for share in shares]
        groups = [group for answer in answers for group in answer.result()]
        return [group for group in groups if not isinstance(group, GroupLost)]

    async def _in_turn(self, requests: list[GenerationRequest]) -> list[Completion]:
        async with self._asking:
            return await self._session.sample(requests, alone=self._in_order)


class EvaluationSchedule:
    """Evaluations of a run during training and at its end.

    In an asynchronous pipeline generators may skip the weights of a step. Then the next weights
    that they hold are evaluated. In a deterministic pipeline training goes on while the weights of
    an earlier step are evaluated. The checkpoint of that step stays the newest one until then, so a
    run that resumes repeats the evaluation.
    """

    def __init__(self, config: RLConfig, evaluation: Evaluation, run: Run):
        self._config = config
        self._in_order = config.rollout.pipeline == "deterministic"
        self._evaluation = evaluation
        self._run = run

    def is_due(self, step: int) -> bool:
        """Whether the weights after ``step`` are evaluated once all generators hold them."""
        evaluated = self._run.report.evaluated
        if not self._evaluation.prompts or not evaluated < step < self._run.last_step:
            return False
        if step == 0:
            return self._config.evaluation.at_start
        if self._in_order and self._config.evaluation.every:
            return step % self._config.evaluation.every == 0
        return self._count_due(step) > 0

    def _count_due(self, step: int) -> int:
        """Return the number of evaluations that are due after the newest one and up to ``step``,
        without that at the start.
        """
        every = self._config.evaluation.every
        last = min(step, self._config.steps - 1)
        first = max(self._run.report.evaluated, 0)
        return max(0, last // every - first // every) if self._evaluation.prompts and every else 0

    async def keep(self, step: int) -> None:
        """Save the weights after ``step``, which the trainer may leave before their evaluation."""
        if self._in_order and self.is_due(step):
            await self._run.save_checkpoint()

    async def evaluate_if_due(self, step: int) -> bool:
        """Evaluate the weights after ``step``, which the generators hold. Return False if the
        evaluation is due and the run is left before it ends.
        """
        run = self._run
        if not self.is_due(step):
            return True
        if run.leaving:
            return False
        if step == 0:
            run.progress.stage("evaluating the initial weights")
        with run.watch.span("evaluate"):
            scores = await run.unless_leaving(self._evaluation.scores())
        if scores is not None:  # generators may have been pulling newer weights as it began
            step = max(step, run.report.first_step(scores["eval/version_min"]))
            skipped = max(0, self._count_due(step) - 1)
            await self._record(step)  # first, so that a kill in between repeats both
            run.report.evaluation(step, scores | {"eval/skipped": skipped})
        elif self._in_order:  # nothing else is in flight
            await run.session.abort()
        return scores is not None

    async def scores(
        self, step: int, metric_calculator: MetricCalculator | None = None
    ) -> dict[str, float]:
        """Return the scores of the present weights. At the end of a run, after ``step``, also write
        their rollouts.
        """
        scores = await self._evaluation.scores(metric_calculator)
        if not self._run.is_training:
            return scores
        await self._record(step)
        skipped = self._count_due(step)
        return scores | ({"eval/skipped": skipped} if skipped else {})

    async def _record(self, step: int) -> None:
        """Write the rollouts of the newest evaluation, which was of the weights after ``step``."""
        chunks = self._evaluation.rollouts
        self._evaluation.rollouts = []
        config = self._config.record
        if chunks and config.rollouts != "none":
            await self._run.record.write_evaluated(step, chunks, max_bytes=config.max_bytes)


def held_out_prompts(config: EvaluationConfig, task: Task) -> list[Prompt]:
    """Return the prompts of each evaluation, none if ``config.prompts`` is 0.

    Raises RunError for prompts that cannot be used, and ConfigError if there are none.
    """
    if config.prompts == 0:
        return []
    if prompts := eval_prompts(task, config.prompts):
        return prompts
    field = "evaluation.prompts"
    problem = f"{field} is {config.prompts}, but {type(task).__name__} holds out no prompts"
    raise ConfigError(problem, field=field, fix="set it to 0 for no evaluation")


def _chunk(groups: list[Group]) -> Chunk:
    return Chunk(rollouts=[rollout for group in groups for rollout in group], columns={})


def _correct(groups: list[Group]) -> list[int]:
    """Return the number of correct completions of each group."""
    return [sum(bool(rollout.metrics["correct"]) for rollout in group) for group in groups]
