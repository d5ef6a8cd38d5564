"""Sampling of completions for prompts, and their scoring."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from rl.errors import GroupLost, RunError
from rl.observe.spans import Stopwatch
from rl.rollout.seeds import derive_seed
from rl.types import Completion, GenerationRequest, Prompt, Rollout, Sampling

Generate = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
Score = Callable[[Prompt, Sequence[Completion]], Awaitable[list[Rollout]]]
"""Scores the completions of one prompt. Raises GroupLost on failure."""


class Rollouter:
    """Sampler of groups of rollouts; the samples depend on prompt_ids alone.

    The first lost group of each kind is reported to ``warn``, with the user's traceback if one
    exists.
    """

    def __init__(
        self,
        score: Score,
        *,
        seed: int,
        watch: Stopwatch,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self._score = score
        self._seed = seed
        self._watch = watch
        self._warn = warn
        self.lost: Counter[str] = Counter()
        """Number of lost groups, including those of evaluations, by reason and exception type."""

    async def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        samples: int,
        generate: Generate,
        stream: str = "train",
    ) -> list[list[Rollout] | GroupLost]:
        """Return ``samples`` rollouts of each prompt, in order, or the GroupLost of its group.
        ``generate`` is called once.
        """
        requests = [
            GenerationRequest(
                request_id=f"{stream}/{prompt.prompt_id}/{sample}",
                prompt_tokens=prompt.tokens,
                seed=derive_seed(self._seed, prompt.prompt_id, sample, stream=stream),
                sampling=sampling,
            )
            for prompt in prompts
            for sample in range(samples)
        ]
        with self._watch.span("generate"):
            completions = await generate(requests)
        if len(completions) != len(requests):
            raise RunError(f"{len(requests)} requests got {len(completions)} completions")
        groups = [completions[i : i + samples] for i in range(0, len(completions), samples)]
        with self._watch.span("score"):
            return await asyncio.gather(*map(self._scored, prompts, groups))

    async def _scored(
        self, prompt: Prompt, completions: list[Completion]
    ) -> list[Rollout] | GroupLost:
        try:
            return await self._score(prompt, completions)
        except GroupLost as lost:
            kind = f"{lost.reason} ({lost.kind})" if lost.kind else lost.reason
            self.lost[kind] += 1
            if self.lost[kind] == 1:
                self._warn(f"{lost}\nthe group is lost; more groups of this kind are only counted")
            return lost
