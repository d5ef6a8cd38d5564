"""Agents that speak the API of OpenAI, as environments."""

import asyncio
import inspect
import math
import os
import secrets
import signal
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, fields
from typing import Any, Self

from rl.environments.protocol import EnvironmentTask, Reply, TokenEnvironment, TokenReply
from rl.errors import RunError, error_text, shown
from rl.gateway.gateway import Ask, Gateway
from rl.gateway.http import serving
from rl.gateway.protocol import ApiError, Limits, context_exceeded
from rl.host.process import without_proxy
from rl.host.threads import DaemonThread
from rl.types import Completion, EpisodeStop, Prompt, Sampling

MAX_OUTPUT = 2**20
"""Maximum size of what a command prints, in bytes; the rest is cut off."""
MAX_ERROR = 2000
"""Size of the end of a command's standard error that its failure shows, in bytes."""
CLOSE_S = 5.0
"""Time for an agent to end when it is cancelled; after it no call waits for the agent."""
PIPE_BYTES = 2**16
"""Size of a pipe."""


class CommandFailed(RunError):
    """Exit code of a command that is not 0."""


@dataclass(frozen=True, slots=True)
class Api:
    """Access of one episode of an agent to the policy."""

    server_url: str
    """Root of the server."""
    session: str
    """Id of the session, which the server captures."""
    key: str
    """Value of ``api_key``."""

    @property
    def base_url(self) -> str:
        """Value of ``base_url`` for a client of OpenAI's API."""
        return f"{self.server_url}/sessions/{self.session}/v1"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that OpenAI's clients read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            **without_proxy(),
        }

    async def run(
        self, command: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None
    ) -> str:
        """Run a command to its end and return its output. Its process group ends with the episode.

        Raises CommandFailed, with the end of its standard error, if its exit code is not 0.
        """
        with _Pipe(slice(MAX_OUTPUT)) as output, _Pipe(slice(-MAX_ERROR, None)) as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output.end,
                stderr=errors.end,
                env={**os.environ, **self.env, **(env or {})},
                start_new_session=True,
            )
            try:
                await process.communicate(stdin.encode())
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if process.returncode:
                message = f"{command[0]} ended with exit code {process.returncode}"
                raise CommandFailed(f"{message}: {errors.text().strip()}")
            return output.text()


class AgentTask(EnvironmentTask):
    """Task whose environment is an agent: a program that talks to the policy by OpenAI's API. ::

        class Sums(AgentTask):
            def prompt(self, prompt_id):
                return self.seed_prompt(prompt_id, text="17 + 25", answer="42")

            def eval_prompts(self, count):
                return []

            async def agent(self, prompt, api):
                async with AsyncOpenAI(base_url=api.base_url, api_key=api.key) as client:
                    ...
                return Reply(reward=1.0, correct=True)

    The conversations of the agent are trained token for token, and each sampled token once. The
    run's ``rollout`` has the parameters of sampling; those of the agent's requests have no effect,
    except for a smaller ``max_tokens``, what ends an answer, its form, and log-probs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        pass

    config: Config

    def __init__(self, config: Config, **options: Any):
        super().__init__(config, **options)
        self._server: _Server | None = None

    @abstractmethod
    def agent(self, prompt: Prompt, api: Api) -> Any:
        """Act on ``prompt`` with the policy that ``api`` leads to; return the :class:`Reply` with
        the reward of the episode.

        May be a coroutine function. Other functions run in a thread. ``api.run`` runs a command. An
        exception costs the group of the episode, unless it is the error of a limit: see
        :class:`AgentEpisode`.
        """

    def environment(self, prompt: Prompt, sample: int) -> TokenEnvironment:
        """Return an episode of the agent."""
        return AgentEpisode(self, prompt)

    async def server(self) -> "_Server":
        """Return the server of this process, which ends with the event loop."""
        loop = asyncio.get_running_loop()
        if self._server is None or self._server.loop is not loop:
            self._server = _Server(self, loop)
        await asyncio.shield(self._server.started)
        return self._server


class AgentEpisode(TokenEnvironment):
    """Episode of an agent. Each request of the agent is a turn, one after the other.

    If a request has no room within ``max_episode_tokens`` or the context, or comes after
    ``max_turns`` answers, the agent gets an error of OpenAI's API. Then it may go on, or return its
    reward. If the agent ends with this error, the reward is 0. Also an exception whose text or
    cause has the text of the error counts as this error, and a command whose last line of standard
    error has it.
    """

    def __init__(self, task: AgentTask, prompt: Prompt):
        self._task = task
        self._prompt = prompt
        self._asks: asyncio.Queue[tuple[Ask, asyncio.Future[Completion]] | None] = asyncio.Queue()
        """Requests of the agent; None at its end."""
        self._answer: asyncio.Future[Completion] | None = None
        """The answer that the agent waits for."""
        self._turns = 0
        self._limit: EpisodeStop = "done"
        """Limit that refused the latest request."""
        self._refusals: dict[str, EpisodeStop] = {}
        """Limits that refused a request, by the text of the error."""
        self._thread = DaemonThread("agent")
        self._session = secrets.token_hex(12)
        self._server: _Server | None = None
        self._agent: asyncio.Future[Any] | None = None

    async def reset(self) -> TokenReply:
        """Start the agent; return its first prompt."""
        self._server = await self._task.server()
        self._server.open(self._session, self._sample)
        api = Api(self._server.url, self._session, self._server.key)
        self._agent = asyncio.ensure_future(self._act(api))
        self._agent.add_done_callback(lambda _: self._asks.put_nowait(None))
        reply = await self._next()
        if reply.done:
            raise RunError("the agent ended without a request")
        return reply

    async def step(self, answer: Completion) -> TokenReply:
        """Give the agent an answer; return its next prompt, or the end."""
        assert self._answer is not None, "the agent waits for an answer"
        self._turns += 1
        self._limit = "done"
        if not self._answer.done():
            self._answer.set_result(answer)
        return await self._next()

    async def close(self) -> None:
        """End the agent."""
        if self._server is not None:
            self._server.close(self._session)
        if self._agent is not None:
            self._agent.cancel()
            await asyncio.wait([self._agent], timeout=CLOSE_S)
        while not self._asks.empty():
            if (asked := self._asks.get_nowait()) is not None:
                self._refuse(asked[1])
        if self._answer is not None:
            self._refuse(self._answer)
        self._thread.shutdown()

    async def _act(self, api: Api) -> Any:
        """Run the agent to its end."""
        act = self._task.agent
        try:
            if inspect.iscoroutinefunction(act):
                return await act(self._prompt, api)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, act, self._prompt, api)
        except (SystemExit, KeyboardInterrupt) as error:  # which would end the event loop
            raise RunError(f"the agent raised {error_text(error)}") from None

    async def _sample(self, ask: Ask) -> Completion:
        """Wait for the answer to a request of the agent. Raises ApiError at a limit."""
        if ask.sampling.prompt_logprobs is not None:
            message = "an agent gets no log-probs of its prompts; leave echo or logprobs out"
            raise ApiError(400, message, code="unsupported_parameter", param="echo")
        answer = asyncio.get_running_loop().create_future()
        self._asks.put_nowait((ask, answer))
        return await answer

    async def _next(self) -> TokenReply:
        """Return the next request that may be answered, or the end of the agent."""
        assert self._agent is not None, "reset starts it"
        while True:
            asked = await self._asks.get()
            if asked is None or self._agent.done():
                return self._end(self._agent)
            ask, self._answer = asked
            if not self._refused(ask, self._answer):
                return TokenReply(
                    tokens=ask.tokens,
                    max_tokens=ask.sampling.max_tokens,
                    top_logprobs=ask.sampling.top_logprobs,
                    stop=ask.sampling.stop,
                    min_tokens=ask.sampling.min_tokens,
                    json_schema=ask.sampling.json_schema,
                )

    def _refused(self, ask: Ask, answer: asyncio.Future[Completion]) -> bool:
        """Whether a limit allows no answer; then the agent gets an error."""
        config = self._task.config
        room = min(config.max_episode_tokens, self._task.shape.max_seq_len) - len(ask.tokens)
        if self._turns >= config.max_turns:
            self._limit = "turns"
            message = f"the episode has {self._turns} turns, as task.max_turns allows"
            error = ApiError(400, message, code="too_many_turns")
        elif room < 1:
            is_context = len(ask.tokens) >= self._task.shape.max_seq_len
            self._limit = "context" if is_context else "length"
            error = context_exceeded(f"{len(ask.tokens)} tokens", room + len(ask.tokens))
        else:
            return False
        self._refusals[str(error)] = self._limit
        answer.set_exception(error)
        return True

    def _refuse(self, answer: asyncio.Future[Completion]) -> None:
        if not answer.done():
            answer.set_exception(ApiError(404, "the episode has ended", code="session_not_found"))

    def _end(self, agent: asyncio.Future[Any]) -> TokenReply:
        """Return the end of the episode, with the reward that the agent returned."""
        assert self._server is not None, "reset opened it"
        if agent.cancelled():
            raise RunError("the agent was cancelled")
        counts = self._server.gateway.capture(self._session).counts
        error = agent.exception()
        if error is not None and (limit := self._limit_of(error)):
            return TokenReply(done=True, stop_reason=limit, metrics=counts)
        reply = agent.result()
        if not isinstance(reply, Reply):
            raise TypeError(f"agent returned {shown(reply)}, which is not a Reply")
        values: dict[str, Any] = {field.name: getattr(reply, field.name) for field in fields(Reply)}
        values |= {"messages": (), "done": True, "metrics": {**counts, **reply.metrics}}
        return TokenReply(**values, stop_reason=self._limit)

    def _limit_of(self, error: BaseException | None) -> EpisodeStop | None:
        """Return the limit whose error ``error`` is or wraps; None for any other failure."""
        if isinstance(error, BaseExceptionGroup):
            limits = [self._limit_of(exception) for exception in error.exceptions]
            return limits[0] if all(limits) else None
        if error is None:
            return None
        said = error_text(error)
        if isinstance(error, CommandFailed):  # its traceback ends with its exception
            said = said.splitlines()[-1]
        matching = (limit for text, limit in self._refusals.items() if text in said)
        return next(matching, None) or self._limit_of(error.__cause__)


class _Server:
    """Gateway of the episodes of a task in this process."""

    def __init__(self, task: AgentTask, loop: asyncio.AbstractEventLoop):
        config = task.config
        os.environ.update(without_proxy())
        self.loop = loop
        self.key = secrets.token_hex(16)
        self.url = ""
        self.started: asyncio.Future[None] = loop.create_future()
        self._samplers: dict[str, Any] = {}
        self.gateway = Gateway(
            self._sample,
            task.dialect,
            sampling=Sampling(max_tokens=config.max_episode_tokens),
            longest=10**9,  # episodes know their own limits
            vocab_size=task.shape.vocab_size,
            enable_thinking=config.enable_thinking,
            limits=Limits(waiting=10**9, sessions=10**9, session_tokens=10**18, session_s=math.inf),
        )
        self._work = loop.create_task(self._serve())

    def open(self, session: str, sample: Any) -> None:
        """Begin a session whose answers ``sample`` gives."""
        self._samplers[session] = sample
        self.gateway.open_session(session)

    def close(self, session: str) -> None:
        """End a session; its requests get an error."""
        if self._samplers.pop(session, None) is not None:
            self.gateway.close_session(session)

    async def _sample(self, ask: Ask) -> Completion:
        if ask.session not in self._samplers:
            raise ApiError(404, "give the base URL of the episode", code="session_not_found")
        return await self._samplers[ask.session](ask)

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            try:
                self.url = await stack.enter_async_context(serving(self.gateway, key=self.key))
            except BaseException as error:
                self.started.set_exception(error)
                raise
            self.started.set_result(None)
            await asyncio.Event().wait()


class _Pipe:
    """Pipe that keeps a part of what processes write to ``end``, and drops the rest."""

    def __init__(self, part: slice):
        self._part = part
        self._kept = b""
        self._begin, self.end = os.pipe()
        os.set_blocking(self._begin, False)
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._loop.add_reader(self._begin, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._begin)
        os.close(self._begin)
        os.close(self.end)

    def _take(self) -> None:
        with suppress(BlockingIOError):
            self._kept = (self._kept + os.read(self._begin, PIPE_BYTES))[self._part]

    def text(self) -> str:
        """Return the part of what has been written so far."""
        self._take()  # all that is in the pipe: other processes may still hold its end
        return self._kept.decode(errors="replace")
