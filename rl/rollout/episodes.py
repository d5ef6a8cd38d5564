"""Rollouts of several turns: answers are sampled, environments continue them."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rl.errors import GroupLost, RunError
from rl.observe.spans import Stopwatch
from rl.rollout.rollouter import Collector, Generate
from rl.rollout.seeds import derive_seed
from rl.sequences import SequenceLog
from rl.types import (
    Completion,
    EpisodeEnd,
    EpisodeTurn,
    GenerationRequest,
    Prompt,
    Rollout,
    Sampling,
)

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
    """All tokens before the next answer."""
    max_tokens: int | None = None
    """Maximum length of the next answer, if the environment sets one."""
    log: SequenceLog = field(default_factory=SequenceLog)
    answers: list[list[int]] = field(default_factory=list)
    """Tokens of each answer of the policy."""
    end: EpisodeEnd | None = None

    def feed(self, turn: EpisodeTurn) -> None:
        """Append what the environment adds, or begin again if it rewrote the history."""
        if turn.is_whole:
            self.tokens = []
        self.tokens += turn.tokens
        self.max_tokens = turn.max_tokens
        self.end = turn.end

    def answer(self, completion: Completion) -> None:
        """Append an answer of the policy."""
        self.log.add(self.tokens, completion)
        self.tokens += completion.tokens
        self.answers.append(completion.tokens)

    def rollout(self) -> Rollout:
        """Return the rollout of the ended episode."""
        assert self.end is not None, "the episode has not ended"
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            sequences=tuple(strand.sequence() for strand in self.log.strands),
            text=self.end.text,
            stop_reason=self.end.stop_reason,
            reward=self.end.reward,
            metrics={"correct": float(self.end.correct), **self.end.metrics},
            turn_rewards=self.end.turn_rewards,
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
            episode.feed(turn)

        await asyncio.gather(*map(advance, episodes))

    async def _open(self, episode: Episode) -> EpisodeTurn:
        return await self._service.open(episode.key, episode.prompt, episode.sample)

    async def _step(self, episode: Episode) -> EpisodeTurn:
        return await self._service.step(episode.key, episode.answers[-1])

    def _request(self, episode: Episode, sampling: Sampling, stream: str) -> GenerationRequest:
        room = self._longest - len(episode.tokens)
        most = min(sampling.max_tokens, room, episode.max_tokens or room)
        turn = len(episode.answers)
        prompt = episode.prompt
        return GenerationRequest(
            request_id=f"{stream}/{prompt.prompt_id}/{episode.sample}/{turn}",
            prompt_tokens=[*episode.tokens],
            seed=derive_seed(self.seed, prompt.prompt_id, episode.sample, turn, stream=stream),
            sampling=replace(sampling, max_tokens=most),
        )
