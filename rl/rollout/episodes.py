"""Rollouts of several turns: answers are sampled, environments continue them."""

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from rl.errors import GroupLost, RunError, WorkerLost
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

MAX_DEATHS = 2
"""Number of workers that may be lost during calls of one episode, which is then tried again."""

_keys = itertools.count()


class EpisodeService(Protocol):
    """Service that holds open episodes: see :class:`rl.rollout.environments.Environments`."""

    async def open(self, key: int, prompt: Prompt, sample: int) -> EpisodeTurn: ...

    async def step(self, key: int, answer: Completion) -> EpisodeTurn: ...

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
    answers: list[Completion] = field(default_factory=list)
    turns: list[EpisodeTurn] = field(default_factory=list)
    """Additions of the environment before each answer, and before the next one."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Number of the sequence and place there at which each answer ends."""
    end: EpisodeEnd | None = None
    lost: GroupLost | None = None
    """Failure that ended the episode."""
    is_open: bool = False
    """Whether it has a place among the open episodes."""
    deaths: int = 0
    """Number of workers that were lost during a call of this episode."""

    def begin_again(self) -> None:
        """Forget all turns."""
        self.tokens = []
        self.log = SequenceLog()
        self.answers = []
        self.turns = []
        self.ends = []

    def feed(self, turn: EpisodeTurn) -> None:
        """Append what the environment adds, or begin again if it rewrote the history."""
        if turn.is_whole:
            self.tokens = []
        self.turns.append(turn)
        self.tokens += turn.tokens
        self.max_tokens = turn.max_tokens
        self.end = turn.end

    def answer(self, completion: Completion) -> None:
        """Append an answer of the policy."""
        sequence = self.log.add(self.tokens, completion)
        self.ends.append((self.log.sequences.index(sequence), len(sequence.tokens)))
        self.tokens += completion.tokens
        self.answers.append(completion)

    def rollout(self) -> Rollout:
        """Return the rollout of the ended episode."""
        assert self.end is not None, "the episode has not ended"
        order = sorted(range(len(self.ends)), key=self.ends.__getitem__)
        rewards = self.end.turn_rewards
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            sequences=tuple(sequence.snapshot() for sequence in self.log.sequences),
            text=self.end.text,
            stop_reason=self.end.stop_reason,
            reward=self.end.reward,
            metrics={"correct": float(self.end.correct), **self.end.metrics},
            turn_rewards=tuple(rewards[number] for number in order) if rewards else (),
            turn_lengths=tuple(len(self.answers[number].tokens) for number in order),
            turn_order=tuple(order),
            cut_turns=sum(answer.finish_reason == "length" for answer in self.answers),
        )


class EpisodeCollector(Collector):
    """Sampler of groups of episodes, in rounds. ::

        while some have not ended:
            open as many of them as may be open
            sample one answer of each           # one call of ``generate``
            step the environment of each        # all are awaited

    The config alone decides which requests a generator answers together. A group that lost an
    episode is lost, unless ``fewest`` of its episodes are left. ``longest`` is
    the maximum length of an episode, in tokens. All calls of ``collect`` together have at most
    ``max_open`` episodes open; 0 for no limit.

    If the worker of an episode is lost, the episode is opened in another one.

    - If its environment can be replayed, it gets the recorded answers. The tokens that it adds must
      be the recorded ones.
    - Otherwise the episode begins again from its first turn.
    - After ``MAX_DEATHS`` workers were lost during calls of an episode, its calls and those of
      other such episodes are made one at a time. If one more worker is lost, so is the episode.
    """

    def __init__(
        self,
        service: EpisodeService,
        *,
        longest: int,
        seed: int,
        watch: Stopwatch,
        warn: Callable[[str], None] = lambda text: None,
        max_open: int = 0,
    ):
        super().__init__(seed=seed, watch=watch, warn=warn)
        self._service = service
        self._longest = longest
        self._alone = asyncio.Lock()
        self._places = asyncio.Semaphore(max_open or sys.maxsize)

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
        ``generate`` is called once a round.
        """
        needed = fewest or samples
        groups = [[Episode(next(_keys), prompt, n) for n in range(samples)] for prompt in prompts]
        everything = [episode for group in groups for episode in group]
        lost: dict[int, GroupLost] = {}
        try:
            while alive := self._alive(groups, needed, lost):
                await self._each(await self._admitted(alive), self._open)
                alive = [each for each in self._alive(groups, needed, lost) if each.is_open]
                if not alive:
                    await self._close(everything, alive)
                    continue
                requests = [self._request(episode, sampling, stream) for episode in alive]
                with self.watch.span("generate"):
                    completions = await generate(requests)
                if len(completions) != len(requests):
                    raise RunError(f"{len(requests)} requests got {len(completions)} completions")
                for episode, completion in zip(alive, completions, strict=True):
                    episode.answer(completion)
                with self.watch.span("score"), self.watch.span("step", "environments"):
                    await self._each(alive, self._step)
                await self._close(everything, self._alive(groups, needed, lost))
        finally:
            await self._close(everything, [])
        for number, group in enumerate(groups):
            for episode in group if number not in lost else ():
                if episode.lost is not None:
                    self.count_episode(episode.lost)
        return [
            lost.get(number) or [episode.rollout() for episode in group if episode.lost is None]
            for number, group in enumerate(groups)
        ]

    async def _admitted(self, alive: list[Episode]) -> list[Episode]:
        """Return the episodes that may be opened, in order. Waits if no other one is open."""
        waiting = [each for each in alive if not each.is_open]
        has_open = len(waiting) < len(alive)
        admitted: list[Episode] = []
        for episode in waiting:
            if has_open and self._places.locked():
                break
            await self._places.acquire()
            episode.is_open = has_open = True
            admitted.append(episode)
        return admitted

    async def _close(self, episodes: list[Episode], alive: list[Episode]) -> None:
        """Close the open ``episodes`` except for those that are ``alive``."""
        kept = {each.key for each in alive}
        over = [each for each in episodes if each.is_open and each.key not in kept]
        await self._service.close([each.key for each in over if each.end is None])
        for each in over:
            each.is_open = False
            self._places.release()

    def _alive(
        self, groups: list[list[Episode]], needed: int, lost: dict[int, GroupLost]
    ) -> list[Episode]:
        """Return the episodes that go on, and note in ``lost`` by index each group that has fewer
        than ``needed`` left. Its reason is that of its first lost episode, in the order of samples.
        """
        alive = []
        for number, group in enumerate(groups):
            errors = [episode.lost for episode in group if episode.lost is not None]
            if len(group) - len(errors) >= needed:
                alive += [each for each in group if each.end is None and each.lost is None]
            elif number not in lost:
                lost[number] = self.count(errors[0])
        return alive

    async def _each(
        self, episodes: list[Episode], act: Callable[[Episode], Awaitable[EpisodeTurn]]
    ) -> None:
        """Advance all ``episodes`` at once, and note the failures of those that fail."""

        async def advance(episode: Episode) -> None:
            try:
                turn = await self._advance(episode, act)
            except GroupLost as error:
                episode.lost = error
                return
            episode.feed(turn)

        await asyncio.gather(*map(advance, episodes))

    async def _advance(
        self, episode: Episode, act: Callable[[Episode], Awaitable[EpisodeTurn]]
    ) -> EpisodeTurn:
        """Return the next turn of ``episode``, in another worker if its own is lost."""
        while True:
            is_suspect = episode.deaths == MAX_DEATHS
            try:
                async with self._alone if is_suspect else nullcontext():
                    return await act(episode)
            except WorkerLost as lost:
                if is_suspect and lost.in_call:
                    raise
                episode.deaths += lost.in_call
                act = self._recover

    async def _recover(self, episode: Episode) -> EpisodeTurn:
        """Open ``episode`` once more; return the turn that was asked for when its worker was lost,
        or the first one if its environment cannot be replayed.
        """
        turn = await self._open(episode)
        if episode.answers and not turn.is_replayable:
            episode.begin_again()
            self.count_recovered("begun again")
        for answer, recorded in zip(episode.answers, episode.turns, strict=True):
            if turn != recorded:
                reason = "environment was not replayable"
                where = f"prompt {episode.prompt.prompt_id}, sample {episode.sample}"
                message = f"an environment that was replayed added other tokens; {where}"
                raise GroupLost(reason, message)
            turn = await self._service.step(episode.key, answer)
        if episode.answers:
            self.count_recovered("replayed")
        return turn

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
