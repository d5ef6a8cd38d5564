"""Sampling of rollouts: of completions that a reward scores, or of episodes of environments."""

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field

from rl.errors import GroupLost, RunError, WorkerLost
from rl.observe.spans import Stopwatch
from rl.rollout.episodes import Environments
from rl.rollout.prompts import derive_seed
from rl.rollout.scoring import unscored
from rl.types import (
    Completion,
    EpisodeEnd,
    EpisodeTurn,
    GenerationRequest,
    Prompt,
    Rollout,
    Sampling,
)
from rl.types.sequences import SequenceLog

MAX_DEATHS = 2
"""Number of workers that may be lost during calls of one episode, which is then tried again."""

Generate = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
Score = Callable[[Prompt, Sequence[Completion]], Awaitable[list[Rollout]]]
"""Function that scores the completions of one prompt. Raises GroupLost on failure."""


_keys = itertools.count()


@dataclass(eq=False)
class Episode:
    """Tokens of an episode in the making. What was sampled is only ever appended to."""

    key: int
    """Number that no other episode of this process has."""
    host: Environments
    """Holder of its environment: those of this process, or
    :class:`rl.actors.reward_workers.RewardWorkers` with the same methods."""
    prompt: Prompt
    sample: int
    tokens: list[int] = field(default_factory=list)
    """All tokens before the next answer."""
    log: SequenceLog = field(default_factory=SequenceLog)
    answers: list[Completion] = field(default_factory=list)
    turns: list[EpisodeTurn] = field(default_factory=list)
    """Additions of the environment before each answer, and after the last one."""
    answer_ends: list[tuple[int, int]] = field(default_factory=list)
    """Number of the sequence and place there at which each answer ends."""
    lost: GroupLost | None = None
    """Failure that ended the episode."""
    is_open: bool = False
    """Whether it has a place among the open episodes."""
    deaths: int = 0
    """Number of workers that were lost during a call of this episode."""

    async def open(self) -> EpisodeTurn:
        """Begin the episode; return the tokens before its first answer."""
        return await self.host.open(self.key, self.prompt, self.sample)

    async def step(self) -> EpisodeTurn:
        """Return what follows the last answer."""
        return await self.host.step(self.key, self.answers[-1])

    @property
    def end(self) -> EpisodeEnd | None:
        """Result of the episode; None before its end."""
        return self.turns[-1].end if self.turns else None

    def feed(self, turn: EpisodeTurn) -> None:
        """Append what the environment adds, or begin again if it rewrote the history."""
        if turn.is_whole:
            self.tokens = []
        self.turns.append(turn)
        self.tokens += turn.tokens

    def answer(self, completion: Completion) -> None:
        """Append an answer of the policy."""
        sequence = self.log.add(self.tokens, completion, self.turns[-1].player)
        self.answer_ends.append((self.log.sequences.index(sequence), len(sequence.tokens)))
        self.tokens += completion.tokens
        self.answers.append(completion)

    def rollout(self) -> Rollout:
        """Return the rollout of the ended episode."""
        assert self.end is not None, "the episode has not ended"
        order = sorted(range(len(self.answer_ends)), key=self.answer_ends.__getitem__)
        rewards = self.end.turn_rewards
        players = [seq.player for seq in self.log.sequences if seq.player is not None]
        all_play = len(players) == len(self.log.sequences)
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
            players=tuple(players) if all_play else (),
            cut_turns=sum(answer.finish_reason == "length" for answer in self.answers),
        )


@dataclass(eq=False)
class Rollouter:
    """Sampler of groups of rollouts; the samples depend on prompt_ids alone.

    A completion is an episode of one turn, which ``score`` ends for a whole group at once. Episodes
    of several turns, of ``environments``, are sampled in rounds. ::

        while some have not ended:
            open as many of them as may be open
            sample one answer of each           # one call of ``generate``
            step the environment of each        # all are awaited

    The config alone decides which requests a generator answers together. A group that lost an
    episode is lost, unless ``fewest`` of its episodes are left. ``longest`` is the maximum length
    of an episode, in tokens. All calls of ``collect`` together have at most ``max_open`` episodes
    open; 0 for no limit.

    If the worker of an episode is lost, the episode is opened in another one.

    - If its environment can be replayed, it gets the recorded answers. The tokens that it adds must
      be the recorded ones.
    - Otherwise the episode begins again from its first turn.
    - After ``MAX_DEATHS`` workers were lost during calls of an episode, its calls and those of
      other such episodes are made one at a time. If one more worker is lost, so is the episode.

    The first lost group of each kind is reported to ``warn``, with the user's traceback if one
    exists.
    """

    score: Score | None = None
    _: KW_ONLY
    environments: Environments | None = None
    longest: int = 0
    max_open: int = 0
    seed: int
    watch: Stopwatch
    warn: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._alone = asyncio.Lock()
        self._places = asyncio.Semaphore(self.max_open or sys.maxsize)
        self.lost: Counter[str] = Counter()
        """Number of lost groups, including those of evaluations, by reason and exception type."""
        self.lost_episodes: Counter[str] = Counter()
        """Number of lost episodes of groups that went on without them, in the same form."""
        self.recovered_episodes: Counter[str] = Counter()
        """Number of times that an episode went on after the loss of its worker: ``replayed`` or
        ``begun again``."""

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

        ``generate`` is called once a round; completions have one round. A group of episodes that
        loses some of them goes on with at least ``fewest``; 0 for all.
        """
        host = self.environments
        if host is None:
            return await self._complete(prompts, sampling, samples, generate, stream)
        needed = fewest or samples
        groups = [
            [Episode(next(_keys), host, prompt, sample) for sample in range(samples)]
            for prompt in prompts
        ]
        everything = [episode for group in groups for episode in group]
        lost: dict[int, GroupLost] = {}
        try:
            while alive := self._alive(groups, needed, lost):
                await self._each(await self._admitted(alive), Episode.open)
                alive = [
                    episode for episode in self._alive(groups, needed, lost) if episode.is_open
                ]
                if alive:
                    requests = [self._request(episode, sampling, stream) for episode in alive]
                    completions = await self._sample(requests, generate)
                    for episode, completion in zip(alive, completions, strict=True):
                        episode.answer(completion)
                    with self.watch.span("score"), self.watch.span("step", "environments"):
                        await self._each(alive, Episode.step)
                await self._close(host, everything, self._alive(groups, needed, lost))
        finally:
            await self._close(host, everything, [])
        for number, group in enumerate(groups):
            for episode in group if number not in lost else ():
                if episode.lost is not None:
                    self._count(episode.lost, self.lost_episodes, "episode")
        return [
            lost.get(number) or [episode.rollout() for episode in group if episode.lost is None]
            for number, group in enumerate(groups)
        ]

    async def _complete(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        samples: int,
        generate: Generate,
        stream: str,
    ) -> list[list[Rollout] | GroupLost]:
        """Return scored completions of each prompt, or the GroupLost of its group."""
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
        completions = await self._sample(requests, generate)
        groups = [completions[i : i + samples] for i in range(0, len(completions), samples)]
        with self.watch.span("score"):
            return await asyncio.gather(*map(self._scored, prompts, groups))

    async def _scored(
        self, prompt: Prompt, completions: list[Completion]
    ) -> list[Rollout] | GroupLost:
        assert self.score is not None, "a session without a task asks for no rollouts"
        try:
            with self.watch.span("score", "reward"):
                return await self.score(prompt, completions)
        except GroupLost as lost:
            lost.rollouts = unscored(prompt, completions)
            self._count(lost, self.lost, "group")
            return lost

    async def _sample(
        self, requests: list[GenerationRequest], generate: Generate
    ) -> list[Completion]:
        with self.watch.span("generate"):
            completions = await generate(requests)
        if len(completions) != len(requests):
            raise RunError(f"{len(requests)} requests got {len(completions)} completions")
        return completions

    async def _admitted(self, alive: list[Episode]) -> list[Episode]:
        """Return the episodes that may be opened, in order. Waits if no other one is open."""
        waiting = [candidate for candidate in alive if not candidate.is_open]
        has_open = len(waiting) < len(alive)
        admitted: list[Episode] = []
        for episode in waiting:
            if has_open and self._places.locked():
                break
            await self._places.acquire()
            episode.is_open = has_open = True
            admitted.append(episode)
        return admitted

    async def _close(
        self, host: Environments, episodes: list[Episode], alive: list[Episode]
    ) -> None:
        """Close the open ``episodes`` except for those that are ``alive``."""
        alive_keys = {episode.key for episode in alive}
        over = [
            episode for episode in episodes if episode.is_open and episode.key not in alive_keys
        ]
        await host.close([episode.key for episode in over if episode.end is None])
        for episode in over:
            episode.is_open = False
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
                alive += [member for member in group if member.end is None and member.lost is None]
            elif number not in lost:
                lost[number] = errors[0]
                self._count(errors[0], self.lost, "group")
        return alive

    async def _each(
        self, episodes: list[Episode], act: Callable[[Episode], Awaitable[EpisodeTurn]]
    ) -> None:
        """Advance all ``episodes`` at once."""
        await asyncio.gather(*(self._advance(episode, act) for episode in episodes))

    async def _advance(
        self, episode: Episode, act: Callable[[Episode], Awaitable[EpisodeTurn]]
    ) -> None:
        """Feed ``episode`` its next turn, in another worker if its own is lost, or note why it is
        lost.
        """
        while True:
            is_suspect = episode.deaths == MAX_DEATHS
            try:
                async with self._alone if is_suspect else nullcontext():
                    episode.feed(await act(episode))
                    return
            except GroupLost as lost:
                if not isinstance(lost, WorkerLost) or (is_suspect and lost.in_call):
                    episode.lost = lost
                    return
                episode.deaths += lost.in_call
                act = self._recover

    async def _recover(self, episode: Episode) -> EpisodeTurn:
        """Open ``episode`` once more; return the turn that was asked for when its worker was lost,
        or the first one if its environment cannot be replayed.
        """
        turn = await episode.open()
        if episode.answers and not turn.is_replayable:
            episode.tokens = []
            episode.log = SequenceLog()
            episode.answers = []
            episode.turns = []
            episode.answer_ends = []
            self._count_recovered("begun again")
        for answer, recorded in zip(episode.answers, episode.turns, strict=True):
            if turn != recorded:
                reason = "environment was not replayable"
                where = f"prompt {episode.prompt.prompt_id}, sample {episode.sample}"
                message = f"an environment that was replayed added other tokens; {where}"
                raise GroupLost(reason, message)
            turn = await episode.host.step(episode.key, answer)
        if episode.answers:
            self._count_recovered("replayed")
        return turn

    def _request(self, episode: Episode, sampling: Sampling, stream: str) -> GenerationRequest:
        room = self.longest - len(episode.tokens)
        turn = len(episode.answers)
        prompt = episode.prompt
        player = episode.turns[-1].player
        return GenerationRequest(
            request_id=f"{stream}/{prompt.prompt_id}/{episode.sample}/{turn}",
            prompt_tokens=[*episode.tokens],
            seed=derive_seed(self.seed, prompt.prompt_id, episode.sample, turn, stream=stream),
            sampling=episode.turns[-1].sampling(sampling, room),
            experts_from=episode.log.recorded(episode.tokens, player),
            player=player,
        )

    def _count(self, lost: GroupLost, counter: Counter[str], noun: str) -> None:
        kind = f"{lost.reason} ({lost.kind})" if lost.kind else lost.reason
        counter[kind] += 1
        if counter[kind] == 1:
            self.warn(f"{lost}\nthe {noun} is lost; more {noun}s of this kind are only counted")

    def _count_recovered(self, how: str) -> None:
        """Count an episode that went on after the loss of its worker."""
        self.recovered_episodes[how] += 1
        if self.recovered_episodes[how] == 1:
            self.warn(f"an episode was {how} after its worker was lost; more are only counted")
