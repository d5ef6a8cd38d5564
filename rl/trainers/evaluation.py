"""Evaluation on held-out prompts: greedy, and pass@k."""

import asyncio
import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from rl.config import EvaluationConfig, RLConfig
from rl.errors import GroupLost, RunError
from rl.metrics import Metrics
from rl.observe.rollouts import Chunk
from rl.rollout.prompts import eval_prompts
from rl.session.concurrency import background
from rl.session.session import Session
from rl.step_folders import StepFolders
from rl.tasks.base import Task
from rl.trainers.ledger import Group
from rl.types import Completion, GenerationRequest, Prompt, Sampling


class Evaluation:
    """Evaluation of the policy on held-out prompts. Its seeds are of a separate stream, and its
    samples are of the whole vocabulary, whatever the cuts of the rollouts.

    - The prompts are cut into shares, at least one for each replica. An engine can run all requests
      of a share at once. A replica gets one share at a time, so the number of prompts does not
      lengthen a call.
    - In a deterministic pipeline a replica answers a share alone and without cached prefixes, as in
      training. So the scores depend on the config and the weights alone.
    - In a deterministic pipeline, training continues and saves while the weights of an earlier step
      are evaluated. ``folder`` keeps these weights until the evaluation has ended, so a run that
      resumes can repeat it.
    """

    def __init__(
        self,
        config: RLConfig,
        prompts: list[Prompt],
        sampling: Sampling,
        session: Session,
        folder: Path,
    ):
        self._config = config.evaluation
        self._steps = config.steps
        self._prompts = prompts
        self._sampling = dataclasses.replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
        self._session = session
        self._replicas = config.generator.replicas
        self._at_once = config.generator.max_running_requests
        self._asking = asyncio.Semaphore(self._replicas)
        self._unevaluated = StepFolders(folder)
        self._in_order = config.rollout.pipeline == "deterministic"
        self._chunks: list[Chunk] = []

    def is_due(self, step: int, evaluated: int) -> bool:
        """Whether the weights after ``step`` are evaluated during training, if the weights after
        ``evaluated`` were the last; -1 before the first evaluation.

        In an asynchronous pipeline generators may skip the weights of a step. Then the next weights
        that they hold are due.
        """
        if not self._prompts or not evaluated < step < self._steps:
            return False
        if step == 0:
            return self._config.at_start
        if self._in_order and self._config.every:
            return step % self._config.every == 0
        return self.count_due(step, evaluated) > 0

    def count_due(self, step: int, evaluated: int) -> int:
        """Return the number of evaluations during training that are due after step ``evaluated``
        and up to ``step``, without that at the start.
        """
        every = self._config.every
        last = min(step, self._steps - 1)
        first = max(evaluated, 0)
        return max(0, last // every - first // every) if self._prompts and every else 0

    def is_behind(self, step: int) -> bool:
        """Whether the weights after ``step`` are evaluated when the trainer may have left them."""
        return self._in_order and self.is_due(step, 0)

    async def keep(self, step: int) -> None:
        """Keep the weights after ``step``, which the trainer holds."""
        await self._session.save_weights(self._unevaluated.path(step))

    async def bring_back(self, step: int, version: int) -> None:
        """Load the weights after ``step``, which are policy ``version``, into the trainer."""
        await self._session.load_weights(self._unevaluated.path(step), version)

    def forget(self, step: int) -> None:
        """Delete the weights that ``keep`` wrote for ``step``, if any."""
        shutil.rmtree(self._unevaluated.path(step), ignore_errors=True)

    def forget_all(self) -> None:
        """Delete all weights that ``keep`` wrote."""
        shutil.rmtree(self._unevaluated.folder, ignore_errors=True)

    def left(self, step: int, evaluated: int) -> list[int]:
        """Return the steps before ``step`` with an evaluation that has not ended; forget the
        others. The run resumes at ``step``.
        """
        kept = self._unevaluated.steps()
        left = [each for each in kept if self.is_due(each, evaluated) and each < step]
        for each in {*kept} - {*left, step}:
            self.forget(each)
        return left

    async def scores(
        self, metric_calculator: Callable[[list[Group]], Mapping[str, float]] | None = None
    ) -> dict[str, float]:
        """Return ``eval/exact_match`` of greedy completions, and ``eval/pass@k``, the share of
        prompts that one of k samples solves. ``eval/reward/NAME`` is a metric of the task's scores
        of greedy completions.

        ``eval/version_min`` and ``eval/version_max`` are the oldest and the newest policy version
        that drew a token. A prompt with a failed reward counts as not solved, and
        ``eval/lost`` counts these failures. Empty if ``config.prompts`` is 0.
        """
        if not self._prompts:
            return {}
        count = len(self._prompts)
        groups = await self._ask(
            dataclasses.replace(self._sampling, temperature=0.0), 1, "eval/greedy"
        )
        own = Metrics.merged(Metrics(group[0].metrics) for group in groups)
        scores = {
            "eval/prompts": float(count),
            "eval/exact_match": _solved(groups) / count,
            "eval/reward_mean": sum(group[0].reward for group in groups) / max(len(groups), 1),
            **{f"eval/reward/{name}": own[name] for name in own if name != "correct"},
        }
        chunks = [_chunk(groups)]
        if samples := self._config.samples:
            sampled = await self._ask(self._sampling, samples, "eval/sampled")
            scores[f"eval/pass@{samples}"] = _solved(sampled) / count
            groups += sampled
            chunks.append(_chunk(sampled))
        scores["eval/lost"] = float(count * (2 if samples else 1) - len(groups))
        versions = {
            version for group in groups for each in group for version in each.versions.tolist()
        }
        scores["eval/version_min"] = min(versions, default=math.nan)
        scores["eval/version_max"] = max(versions, default=math.nan)
        if metric_calculator is not None:
            scores |= {f"eval/{name}": value for name, value in metric_calculator(groups).items()}
        self._chunks = chunks
        return scores

    def take_rollouts(self) -> list[Chunk]:
        """Return the rollouts that the newest scores are of, and forget them: greedy completions,
        and then, if there are any, sampled ones.
        """
        chunks = self._chunks
        self._chunks = []
        return chunks

    async def _ask(self, sampling: Sampling, samples: int, stream: str) -> list[Group]:
        """Return scored samples of each prompt, in order, without prompts with a failed reward."""
        size = min(-(-len(self._prompts) // self._replicas), max(1, self._at_once // samples))
        async with background() as work:
            shares = [
                work.create_task(
                    self._session.rollouter.collect(
                        self._prompts[first : first + size],
                        sampling,
                        samples=samples,
                        stream=stream,
                        generate=self._generate_in_turn,
                    )
                )
                for first in range(0, len(self._prompts), size)
            ]
        groups = [group for share in shares for group in share.result()]
        return [group for group in groups if not isinstance(group, GroupLost)]

    async def _generate_in_turn(self, requests: list[GenerationRequest]) -> list[Completion]:
        async with self._asking:
            return await self._session.sample(requests, alone=self._in_order)


def held_out_prompts(config: EvaluationConfig, task: Task) -> list[Prompt]:
    """Return the prompts of each evaluation, none if ``config.prompts`` is 0.

    Raises RunError for prompts that cannot be used.
    """
    if config.prompts == 0:
        return []
    if prompts := eval_prompts(task, config.prompts):
        return prompts
    name = type(task).__name__
    raise RunError(
        f"evaluation.prompts is {config.prompts}, but {name} holds out no prompts; set it to 0 for "
        "no evaluation"
    )


def _chunk(groups: list[Group]) -> Chunk:
    return Chunk(rollouts=[rollout for group in groups for rollout in group], columns={})


def _solved(groups: list[Group]) -> int:
    return sum(any(rollout.metrics["correct"] for rollout in group) for group in groups)
