"""Samples completions for prompts and has them scored."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from rl.errors import GroupLost, RunError
from rl.observe.spans import Stopwatch
from rl.rollout.seeds import derive_seed
from rl.types import Completion, GenerationRequest, Prompt, Rollout, Sampling

Generate = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
Score = Callable[[Prompt, Sequence[Completion]], Awaitable[list[Rollout]]]
"""Scores the completions of one prompt. Raises GroupLost where that fails."""


class Rollouter:
    """Turns prompts into groups of rollouts; what is sampled depends on prompt_ids alone.

    The first lost group of each kind is told to ``warn``, with the user's traceback if there is
    one.
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
        """How many groups were lost, those of evaluations included, by reason and type of
        exception."""

    async def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        samples: int,
        generate: Generate,
        stream: str = "train",
    ) -> list[list[Rollout] | GroupLost]:
        """``samples`` rollouts of each prompt, in order, or why there are none; ``generate`` is
        called once.
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
            raise RunError(
                f"{len(requests)} completions were asked for, and {len(completions)} came"
            )
        with self._watch.span("score"):
            return await asyncio.gather(
                *(
                    self._scored(prompt, completions[i * samples : (i + 1) * samples])
                    for i, prompt in enumerate(prompts)
                )
            )

    async def _scored(
        self, prompt: Prompt, completions: list[Completion]
    ) -> list[Rollout] | GroupLost:
        try:
            return await self._score(prompt, completions)
        except GroupLost as lost:
            kind = f"{lost.reason} ({lost.kind})" if lost.kind else lost.reason
            self.lost[kind] += 1
            if self.lost[kind] == 1:
                self._warn(
                    f"{lost}\nthe group is lost; others that are lost for this reason are only "
                    "counted"
                )
            return lost
