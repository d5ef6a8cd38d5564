"""Sampling of completions for prompts, and their scoring."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rl.errors import GroupLost, RunError
from rl.observe.spans import Stopwatch
from rl.rollout.scoring import unscored
from rl.rollout.seeds import derive_seed
from rl.types import Completion, GenerationRequest, Prompt, Rollout, Sampling

Generate = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
Score = Callable[[Prompt, Sequence[Completion]], Awaitable[list[Rollout]]]
"""Scores the completions of one prompt. Raises GroupLost on failure."""


class Collector(ABC):
    """Sampler of groups of rollouts; the samples depend on prompt_ids alone.

    The first lost group of each kind is reported to ``warn``, with the user's traceback if one
    exists.
    """

    def __init__(
        self, *, seed: int, watch: Stopwatch, warn: Callable[[str], None] = lambda text: None
    ):
        self.seed = seed
        self.watch = watch
        self._warn = warn
        self.lost: Counter[str] = Counter()
        """Number of lost groups, including those of evaluations, by reason and exception type."""
        self.lost_episodes: Counter[str] = Counter()
        """Number of lost episodes of groups that went on without them, in the same form."""
        self.recovered_episodes: Counter[str] = Counter()
        """Number of times that an episode went on after the loss of its worker: ``replayed`` or
        ``begun again``."""

    @abstractmethod
    async def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        samples: int,
        generate: Generate,
        stream: str = "train",
        fewest: int = 0,
    ) -> list[list[Rollout] | GroupLost]:
        """Return ``samples`` rollouts of each prompt, in order, or the GroupLost of its group.

        A group of episodes that loses some of them goes on with at least ``fewest``; 0 for all.
        """

    def count(self, lost: GroupLost) -> GroupLost:
        """Count a lost group, and return it."""
        self._count(lost, self.lost, "group")
        return lost

    def count_episode(self, lost: GroupLost) -> None:
        """Count a lost episode of a group that went on without it."""
        self._count(lost, self.lost_episodes, "episode")

    def count_recovered(self, how: str) -> None:
        """Count an episode that went on after the loss of its worker."""
        self.recovered_episodes[how] += 1
        if self.recovered_episodes[how] == 1:
            self._warn(f"an episode was {how} after its worker was lost; more are only counted")

    def _count(self, lost: GroupLost, counter: Counter[str], noun: str) -> None:
        kind = f"{lost.reason} ({lost.kind})" if lost.kind else lost.reason
        counter[kind] += 1
        if counter[kind] == 1:
            self._warn(f"{lost}\nthe {noun} is lost; more {noun}s of this kind are only counted")


class Rollouter(Collector):
    """Sampler of single completions, which ``score`` turns into rollouts."""

    def __init__(self, score: Score, **options: Any):
        super().__init__(**options)
        self._score = score

    async def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        samples: int,
        generate: Generate,
        stream: str = "train",
        fewest: int = 0,
    ) -> list[list[Rollout] | GroupLost]:
        """Return ``samples`` rollouts of each prompt, in order, or the GroupLost of its group.
        ``generate`` is called once. ``fewest`` has no effect: it concerns episodes.
        """
        requests = [
            GenerationRequest(
                request_id=f"{stream}/{prompt.prompt_id}/{sample}",
                prompt_tokens=prompt.tokens,
                seed=derive_seed(self.seed, prompt.prompt_id, sample, stream=stream),
                sampling=sampling,
            )
            for prompt in prompts
            for sample in range(samples)
        ]
        with self.watch.span("generate"):
            completions = await generate(requests)
        if len(completions) != len(requests):
            raise RunError(f"{len(requests)} requests got {len(completions)} completions")
        groups = [completions[i : i + samples] for i in range(0, len(completions), samples)]
        with self.watch.span("score"):
            return await asyncio.gather(*map(self._scored, prompts, groups))

    async def _scored(
        self, prompt: Prompt, completions: list[Completion]
    ) -> list[Rollout] | GroupLost:
        try:
            return await self._score(prompt, completions)
        except GroupLost as lost:
            lost.rollouts = unscored(prompt, completions)
            return self.count(lost)
