"""Samples completions for prompts and scores them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rl.errors import RunError
from rl.observe.spans import Stopwatch
from rl.rollout.seeds import derive_seed
from rl.tasks.base import Task
from rl.types import Completion, GenerationRequest, Prompt, Rollout, Sampling

Generate = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]


class Rollouter:
    """Turns prompts into groups of rollouts; what is sampled depends on ordinals alone."""

    def __init__(self, task: Task, generate: Generate, *, seed: int, watch: Stopwatch):
        self._task, self._generate = task, generate
        self._seed, self._watch = seed, watch

    async def collect(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples: int, stream: str = "train"
    ) -> list[list[Rollout]]:
        """``samples`` rollouts of each prompt, grouped by prompt, in order.

        Raises RunError, naming the prompt, if the task's ``score`` raises.
        """
        places = [(prompt, sample) for prompt in prompts for sample in range(samples)]
        requests = [
            GenerationRequest(
                request_id=f"{stream}/{prompt.ordinal}/{sample}",
                prompt_tokens=prompt.tokens,
                seed=derive_seed(self._seed, prompt.ordinal, sample, stream=stream),
                sampling=sampling,
            )
            for prompt, sample in places
        ]
        with self._watch.span("generate"):
            completions = await self._generate(requests)
        with self._watch.span("score"):
            rollouts = await asyncio.to_thread(self._score_all, places, completions)
        return [rollouts[i : i + samples] for i in range(0, len(rollouts), samples)]

    def _score_all(self, places: list[tuple[Prompt, int]], completions: list[Completion]) -> list[Rollout]:
        return [
            self._score(prompt, sample, completion)
            for (prompt, sample), completion in zip(places, completions, strict=True)
        ]

    def _score(self, prompt: Prompt, sample: int, completion: Completion) -> Rollout:
        text = self._task.decode(completion.tokens)
        try:
            score = self._task.score(prompt, text, completion)
        except Exception as error:  # the user's own code: say which input it failed on
            raise RunError(
                f"the reward of {type(self._task).__name__} raised {type(error).__name__}: {error}; "
                f"prompt {prompt.ordinal}, sample {sample}, completion {text!r}"
            ) from error
        return Rollout(
            prompt=prompt,
            sample=sample,
            completion=completion,
            text=text,
            reward=score.reward,
            metrics={"exact": float(score.exact), **score.metrics},
        )
