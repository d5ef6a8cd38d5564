"""Rollouts of several turns: answers are sampled, environments continue them."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rl.errors import GroupLost, RunError
from rl.observe.spans import Stopwatch
from rl.rollout.rollouter import Collector, Generate
from rl.rollout.seeds import derive_seed
from rl.types import (
    Completion,
    EpisodeEnd,
    EpisodeTurn,
    GenerationRequest,
    Prompt,
    Rollout,
    Sampling,
)
from rl.types import Sequence as TokenSequence

_keys = itertools.count()


class EpisodeService(Protocol):
    """Open episodes, wherever they run: see :class:`rl.rollout.environments.Environments`."""

    async def open(self, key: int, prompt: Prompt, sample: int) -> EpisodeTurn: ...

    async def step(self, key: int, answer: list[int]) -> EpisodeTurn: ...

    async def close(self, keys: Iterable[int]) -> None: ...


@dataclass(eq=False)
class Episode:
    """Tokens of an episode in the making. What was sampled is only ever appended to."""

    key: int
    """Number that no other episode of this process has."""
    prompt: Prompt
    sample: int
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """Tokens of each answer of the policy."""
    end: EpisodeEnd | None = None

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self._append(tokens, False, [0.0] * len(tokens), [-1] * len(tokens))

    def answer(self, completion: Completion) -> None:
        """Append an answer of the policy."""
        self._append(completion.tokens, True, completion.logprobs, completion.versions)
        self.answers.append(completion.tokens)

    def _append(
        self,
        tokens: Sequence[int],
        sampled: bool,
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        self.tokens += tokens
        self.sampled += [sampled] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions

    def rollout(self) -> Rollout:
        """Return the rollout of the ended episode."""
        assert self.end is not None, "the episode has not ended"
        sequence = TokenSequence(
            tokens=np.array(self.tokens, dtype=np.int32),
            sampled=np.array(self.sampled, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
        )
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            sequences=(sequence,),
            text=self.end.text,
            stop_reason=self.end.stop_reason,
            reward=self.end.reward,
            metrics={"correct": float(self.end.correct), **self.end.metrics},
        )


class EpisodeCollector(Collector):
    """Sampler of groups of episodes, in rounds. ::

        open all episodes
        while some have not ended:
            sample one answer of each           # one call of ``generate``
            step the environment of each        # all are awaited

    So which requests a generator answers together depends on the config alone, and a lost episode
    costs its group alone. ``longest`` is the maximum length of an episode, in tokens.
    """

    def __init__(
        self,
        service: EpisodeService,
        *,
        longest: int,
        seed: int,
        watch: Stopwatch,
        warn: Callable[[str], None] = lambda text: None,
    ):
        super().__init__(seed=seed, watch=watch, warn=warn)
        self._service = service
        self._longest = longest

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
        ``generate`` is called once a round.
        """
        groups = [[Episode(next(_keys), prompt, n) for n in range(samples)] for prompt in prompts]
        everything = [episode for group in groups for episode in group]
        lost: dict[int, GroupLost] = {}
        try:
            await self._each(everything, self._open, lost)
            while alive := [
                episode
                for number, group in enumerate(groups)
                for episode in group
                if episode.end is None and prompts[number].prompt_id not in lost
            ]:
                requests = [self._request(episode, sampling, stream) for episode in alive]
                with self.watch.span("generate"):
                    completions = await generate(requests)
                if len(completions) != len(requests):
                    raise RunError(f"{len(requests)} requests got {len(completions)} completions")
                for episode, completion in zip(alive, completions, strict=True):
                    episode.answer(completion)
                with self.watch.span("score"):
                    await self._each(alive, self._step, lost)
        finally:
            await self._service.close([each.key for each in everything if each.end is None])
        return [
            lost.get(prompt.prompt_id) or [episode.rollout() for episode in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    async def _each(
        self,
        episodes: list[Episode],
        act: Callable[[Episode], Awaitable[EpisodeTurn]],
        lost: dict[int, GroupLost],
    ) -> None:
        """Advance all ``episodes`` at once, and note in ``lost`` the groups of those that fail."""

        async def advance(episode: Episode) -> None:
            try:
                turn = await act(episode)
            except GroupLost as error:
                if episode.prompt.prompt_id not in lost:
                    lost[episode.prompt.prompt_id] = self.count(error)
                return
            episode.feed(turn.tokens)
            episode.end = turn.end

        await asyncio.gather(*map(advance, episodes))

    async def _open(self, episode: Episode) -> EpisodeTurn:
        return await self._service.open(episode.key, episode.prompt, episode.sample)

    async def _step(self, episode: Episode) -> EpisodeTurn:
        return await self._service.step(episode.key, episode.answers[-1])

    def _request(self, episode: Episode, sampling: Sampling, stream: str) -> GenerationRequest:
        room = self._longest - len(episode.tokens)
        turn = len(episode.answers)
        prompt = episode.prompt
        return GenerationRequest(
            request_id=f"{stream}/{prompt.prompt_id}/{episode.sample}/{turn}",
            prompt_tokens=[*episode.tokens],
            seed=derive_seed(self.seed, prompt.prompt_id, episode.sample, turn, stream=stream),
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)),
        )
