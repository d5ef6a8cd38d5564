"""Samples completions for prompts and has them scored."""

from collections.abc import Awaitable, Callable, Sequence

from rl.errors import GroupLost
from rl.observe.spans import Stopwatch
from rl.rollout.seeds import derive_seed
from rl.types import Completion, GenerationRequest, Prompt, Rollout, Sampling

Generate = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
Answered = tuple[Prompt, list[Completion]]
Score = Callable[[Sequence[Answered]], Awaitable[list[list[Rollout] | GroupLost]]]
"""Scores the completions of some prompts; a prompt whose reward fails gets the reason."""


class Rollouter:
    """Turns prompts into groups of rollouts; what is sampled depends on ordinals alone."""

    def __init__(self, score: Score, *, seed: int, watch: Stopwatch):
        self._score, self._seed, self._watch = score, seed, watch

    async def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        samples: int,
        generate: Generate,
        stream: str = "train",
    ) -> list[list[Rollout] | GroupLost]:
        """``samples`` rollouts of each prompt, in order, or why there are none; ``generate`` is called once."""
        requests = [
            GenerationRequest(
                request_id=f"{stream}/{prompt.ordinal}/{sample}",
                prompt_tokens=prompt.tokens,
                seed=derive_seed(self._seed, prompt.ordinal, sample, stream=stream),
                sampling=sampling,
            )
            for prompt in prompts
            for sample in range(samples)
        ]
        with self._watch.span("generate"):
            said = await generate(requests)
        answered = [(prompt, said[i * samples : (i + 1) * samples]) for i, prompt in enumerate(prompts)]
        with self._watch.span("score"):
            return await self._score(answered)
