"""Episodes of a worker: environments, and the tokens between them and the policy."""

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, get_args

import numpy as np

from rl.dialects.dialect import ConversationError
from rl.environments.protocol import (
    Environment,
    EnvironmentTask,
    Opening,
    Reply,
    TokenEnvironment,
    TokenReply,
)
from rl.environments.task import Score
from rl.errors import GroupLost, error_text, name_of, shown, trace_of, type_of
from rl.host.threads import DaemonThread
from rl.rollout.scoring import InvalidScore, plain_score
from rl.types import (
    MAX_TOP_LOGPROBS,
    Completion,
    EpisodeEnd,
    EpisodeStop,
    EpisodeTurn,
    Prompt,
)

ASKED = ("max_tokens", "top_logprobs", "min_tokens", "json_schema", "player")
"""Fields of a TokenReply and of the EpisodeTurn that it becomes."""
UNREAD = "error: no call of this answer was run, since one of them is malformed"


@dataclass(eq=False)
class _Episode:
    prompt: Prompt
    sample: int
    environment: Environment | None = None
    tokens: list[int] = field(default_factory=list)
    """All tokens before the next answer."""
    turns: int = 0
    malformed: int = 0
    """Number of tool calls that could not be read."""
    score: Score = field(default_factory=lambda: Score(reward=0.0, correct=False))
    """Score so far."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each step."""
    is_hung: bool = False
    """Whether a call holds the thread of the episode."""
    spent: float = 0.0
    """Time of the calls of the environment, in s."""
    thread: DaemonThread = field(default_factory=DaemonThread)

    def __str__(self) -> str:
        return f"prompt {self.prompt.prompt_id}, sample {self.sample}, turn {self.turns}"


class Environments:
    """Open episodes of ``task``, each under a key. ::

        environments = Environments(task)
        turn = await environments.open(1, prompt, sample=0)
        while turn.end is None:
            turn = await environments.step(1, completion)     # of the policy

    ``open`` and ``step`` raise GroupLost, and close the episode, if its environment raises an
    error, does not return in time, or returns something else than the protocol asks for.
    """

    def __init__(self, task: EnvironmentTask):
        self._task = task
        self._options = {"enable_thinking": task.config.enable_thinking}
        self._open: dict[int, _Episode] = {}
        self.hung = 0
        """Number of calls that did not return in time; their threads are still running."""

    def __len__(self) -> int:
        """Number of open episodes."""
        return len(self._open)

    async def open(self, key: int, prompt: Prompt, sample: int) -> EpisodeTurn:
        """Begin an episode; return the tokens before its first answer."""
        episode = self._open[key] = _Episode(prompt, sample)
        async with self._closed_on_failure(key, "reset"):
            make = self._task.environment
            environment = episode.environment = await self._call(episode, make, prompt, sample)
            if not (hasattr(environment, "reset") and hasattr(environment, "step")):
                what = f"environment returned {shown(environment)}, which has no reset and step"
                self._refuse(episode, what)
            opening = await self._call(episode, environment.reset)
            if isinstance(environment, TokenEnvironment):
                first = self._given(episode, "reset", opening, may_end=False)
            else:
                if not isinstance(opening, Opening):
                    self._refuse(
                        episode, f"reset returned {shown(opening)}, which is not an Opening"
                    )
                tools: Any = opening.tools
                if isinstance(tools, Iterable):
                    tools = [*tools] or None
                rendered = self._task.dialect.render(
                    opening.messages, tools, add_generation_prompt=True, **self._options
                )
                first = TokenReply(tokens=rendered.tokens.tolist())
            episode.tokens = [*first.tokens]
            length = len(episode.tokens)
            most, field = self._task.prompt_limit()
            room = self._task.config.max_episode_tokens - 1
            if room < most:
                most = room
                field = f"task.max_episode_tokens={room + 1} with room for one token more"
            if length > most:
                what = f"the first messages of an environment of {type(self._task).__name__} are"
                message = f"{what} {length} tokens; {field} allows {most}; {episode}"
                raise GroupLost("opening too long", message)
            replayable = getattr(environment, "replayable", False) is True
        return EpisodeTurn(tokens=[*first.tokens], is_replayable=replayable, **_asked(first))

    async def step(self, key: int, answer: Completion) -> EpisodeTurn:
        """Give the environment an answer of the policy; return the tokens before the next answer,
        or the end of the episode, which is closed then.
        """
        async with self._closed_on_failure(key, "step"):
            turn = await self._answered(self._open[key], answer)
        if turn.end is not None:
            await self.close([key])
        return turn

    @asynccontextmanager
    async def _closed_on_failure(self, key: int, method: str) -> AsyncIterator[None]:
        """Close the episode if the block raises an error. ``method`` gave the messages."""
        episode = self._open[key]
        try:
            yield
        except ConversationError as error:
            await self.close([key])
            self._refuse(episode, f"{method} returned messages that cannot be rendered: {error}")
        except BaseException:
            await self.close([key])
            raise

    async def close(self, keys: Iterable[int]) -> None:
        """Close the episodes of ``keys`` that are open. Raises nothing."""
        episodes = [self._open.pop(key) for key in keys if key in self._open]
        await asyncio.gather(*map(self._close, episodes))

    async def _close(self, episode: _Episode) -> None:
        close = getattr(episode.environment, "close", None)
        if episode.is_hung and not inspect.iscoroutinefunction(close):
            if close is not None:  # runs after the call that hangs; no caller waits
                episode.thread.submit(close)
            episode.thread.shutdown()
            return
        if close is not None:
            with suppress(GroupLost):  # the rollout is complete, or lost for another reason
                await self._call(episode, close)
        episode.thread.shutdown()

    async def _answered(self, episode: _Episode, completion: Completion) -> EpisodeTurn:
        assert episode.environment is not None, "open made it"
        answer = completion.tokens
        turn = self._task.dialect.parse(episode.tokens, answer)
        episode.turns += 1
        broken = sum(bool(call.error) for call in turn.tool_calls)
        episode.malformed += broken
        environment = episode.environment
        writes_tokens = isinstance(environment, TokenEnvironment)
        if writes_tokens:
            step = await self._call(episode, environment.step, completion)
            self._given(episode, "step", step, may_end=True)
        elif broken:
            step = Reply(
                messages=[
                    {"role": "tool", "content": f"error: {call.error}" if call.error else UNREAD}
                    for call in turn.tool_calls
                ]
            )
        else:
            step = await self._call(episode, environment.step, turn.message)
        self._count(episode, step)
        before = [*episode.tokens, *answer]
        if not writes_tokens:
            more = []
            if not step.done:
                continuation = self._task.dialect.continuation
                more = continuation(episode.tokens, answer, step.messages, **self._options)
            step = TokenReply(tokens=before + more, done=step.done)
        if step.done:
            return self._end(episode, answer, step.stop_reason)
        whole = [*step.tokens]
        if reason := self._limit(episode, len(whole)):
            # an environment that writes tokens gives its reward at the end
            if reason == "timeout" and writes_tokens:
                limit = self._task.config.episode_s
                name = type(environment).__name__
                message = f"{name} took longer than task.episode_s={limit:g}; {episode}"
                raise GroupLost("environment timed out", message)
            return self._end(episode, answer, reason)
        episode.tokens = whole
        is_whole = whole[: len(before)] != before
        more = whole if is_whole else whole[len(before) :]
        return EpisodeTurn(tokens=[*more], is_whole=is_whole, **_asked(step))

    def _given(self, episode: _Episode, method: str, reply: Any, *, may_end: bool) -> TokenReply:
        """Return ``reply``, which has to be a TokenReply with tokens of the model, or the end."""
        if not isinstance(reply, TokenReply):
            self._refuse(episode, f"{method} returned {shown(reply)}, which is not a TokenReply")
        for is_right, rule in _rules(reply, self._task.shape.vocab_size, may_end=may_end):
            if not is_right:
                self._refuse(episode, f"{method} returned {shown(reply)}; {rule}")
        return reply

    def _count(self, episode: _Episode, step: Any) -> None:
        """Add the reward of ``step`` to the score of the episode."""
        if not isinstance(step, Reply):
            self._refuse(episode, f"step returned {shown(step)}, which is not a Reply")
        if not isinstance(step.done, int | np.bool_):
            self._refuse(episode, f"step returned done={shown(step.done)}, which is not a bool")
        before = episode.score
        try:
            score = Score(reward=step.reward, correct=step.correct, metrics=step.metrics)
            now = plain_score(score)
        except InvalidScore as error:
            self._refuse(episode, f"step returned {error}")
        episode.rewards.append(now.reward or 0.0)
        for turn, more in step.earlier.items():
            if turn not in range(episode.turns) or not math.isfinite(more):
                what = f"step returned earlier={shown(step.earlier)}, which are not finite rewards"
                self._refuse(episode, f"{what} of earlier answers")
            episode.rewards[turn] += float(more)
        abstains = before.reward is None or now.reward is None
        episode.score = Score(
            reward=None if abstains else sum(episode.rewards),
            correct=now.correct,
            metrics={**before.metrics, **now.metrics},
        )

    def _limit(self, episode: _Episode, length: int) -> EpisodeStop | None:
        """Return the limit that allows no answer after ``length`` tokens; None if all allow it."""
        config = self._task.config
        if length >= self._task.shape.max_seq_len:
            return "context"
        if length >= config.max_episode_tokens:
            return "length"
        if episode.turns >= config.max_turns:
            return "turns"
        if episode.spent > config.episode_s:
            return "timeout"
        return None

    def _end(self, episode: _Episode, answer: list[int], reason: EpisodeStop) -> EpisodeTurn:
        score = episode.score
        counts = {"turns": float(episode.turns), "malformed_calls": float(episode.malformed)}
        end = EpisodeEnd(
            text=self._task.tokenizer.decode([*episode.tokens, *answer]),
            reward=math.nan if score.reward is None else score.reward,
            correct=score.correct,
            metrics={**score.metrics, **counts},
            stop_reason=reason,
            turn_rewards=tuple(episode.rewards),
        )
        return EpisodeTurn(tokens=[], end=end)

    async def _call(self, episode: _Episode, method: Callable[..., Any], *args: Any) -> Any:
        """Call the user's ``method`` as a coroutine or in the thread of the episode."""
        where = f"{type(self._task).__name__}.{name_of(method)}"
        loop = asyncio.get_running_loop()
        if inspect.iscoroutinefunction(method):
            work = asyncio.ensure_future(method(*args))
        else:
            work = loop.run_in_executor(episode.thread, method, *args)
        limit = self._task.config.step_s
        clock = asyncio.timeout(limit)
        begin = time.monotonic()
        try:
            async with clock:
                return await work
        except BaseException as error:  # the user's own code, which may raise SystemExit too
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if not clock.expired():
                message = f"{where} raised {error_text(error)}; {episode}\n{trace_of(error)}"
                raise GroupLost("environment raised", message, type_of(error)) from None
            episode.is_hung = not inspect.iscoroutinefunction(method)
            self.hung += episode.is_hung
            message = f"{where} took longer than task.step_s={limit:g}; {episode}"
            raise GroupLost("environment hung", message) from None
        finally:
            episode.spent += time.monotonic() - begin

    def _refuse(self, episode: _Episode, what: str) -> NoReturn:
        message = f"an environment of {type(self._task).__name__}: {what}; {episode}"
        raise GroupLost("environment was invalid", message)


async def played(
    task: EnvironmentTask, prompt: Prompt, answer: Completion, *, turns: float = math.inf
) -> EpisodeEnd | None:
    """Play an episode in which every answer of the policy is ``answer``. Return its end, or None if
    it goes on after so many ``turns``. Raises GroupLost.
    """
    environments = Environments(task)
    try:
        turn = await environments.open(0, prompt, 0)
        while turn.end is None and turns > 0:
            turn = await environments.step(0, answer)
            turns -= 1
    finally:
        await environments.close([0])
    return turn.end


def _rules(reply: TokenReply, size: int, *, may_end: bool) -> Iterator[tuple[bool, str]]:
    """Yield whether each field of ``reply`` is right, and its rule. Ids are below ``size``."""
    tokens, most, top = reply.tokens, reply.max_tokens, reply.top_logprobs
    known = isinstance(tokens, Sequence) and all(
        isinstance(token, int) and 0 <= token < size for token in tokens
    )
    yield bool((may_end and reply.done) or (known and tokens)), f"give tokens below {size}"
    has_room = most is None or (isinstance(most, int) and most >= 1)
    yield has_room, "give a max_tokens of at least 1, or None"
    is_count = isinstance(top, int) and 0 <= top <= MAX_TOP_LOGPROBS
    yield is_count, f"give a top_logprobs from 0 to {MAX_TOP_LOGPROBS}"
    are_texts = not isinstance(reply.stop, str) and all(
        isinstance(text, str) and text for text in reply.stop
    )
    yield are_texts, "give a stop of texts that are not empty"
    least, schema = reply.min_tokens, reply.json_schema
    yield isinstance(least, int) and 0 <= least <= (most or least), "give a min_tokens from 0"
    yield schema is None or isinstance(schema, str), "give a json_schema as text, or None"
    player = reply.player
    yield player is None or (isinstance(player, int) and player >= 0), "give a player from 0"
    is_lone = not (least and (reply.stop or schema))
    yield is_lone, "leave min_tokens out, or stop and json_schema"
    reasons = get_args(EpisodeStop)
    yield reply.stop_reason in reasons, f"give a stop_reason of {', '.join(reasons)}"


def _asked(reply: TokenReply) -> dict[str, Any]:
    """Return what an environment asks of the next answer, as fields of an EpisodeTurn."""
    return {"stop": tuple(reply.stop)} | {name: getattr(reply, name) for name in ASKED}
