"""Sessions of a gateway, and what its endpoints answer."""

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

from rl.dialects.dialect import ConversationError, Dialect, joined_text
from rl.gateway.answers import Choice, Form, size_of, until
from rl.gateway.capture import Capture, Opened, before
from rl.gateway.drafts import Draft
from rl.gateway.protocol import (
    ApiError,
    Asked,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Limits,
    Sampled,
    SamplingParams,
    aside,
    context_exceeded,
    read,
    sample_seed,
)
from rl.gateway.responses import ResponseRequest, ResponseStream, response_of
from rl.gateway.schemas import schema_of
from rl.gateway.streams import ChatStream, CompletionStream, Reply
from rl.types import Completion, Part, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Answer to sample."""

    session: str
    """Id of the session; empty without one."""
    tokens: list[int]
    sampling: Sampling
    """Parameters of sampling; ``max_tokens`` is at most the number of tokens that are left."""
    seed: int
    on_tokens: Callable[[Part], None] | None = field(default=None, compare=False)
    """Called with tokens as they are sampled, if the client wants a stream; a sampler that does not
    call it gives the client the whole answer at its end."""


Sample = Callable[[Ask], Awaitable[Completion]]
"""Samples an answer. An ApiError is given to the client."""


Choose = Callable[[Completion], Choice]
"""Notes a sampled answer and returns it as the client gets it."""
Work = list[tuple[Ask, Choose, Draft | None]]
Making = tuple[asyncio.Future[list[Choice]], list[Draft]]
"""Choices in the making, and with a stream their drafts."""

ID_OF = {ChatRequest: "chatcmpl", CompletionRequest: "cmpl", ResponseRequest: "resp"}
"""Begin of the ids of answers by the kind of the request, as OpenAI's API has it."""

REMEMBERED = 8
"""Number of latest requests of a session whose answers are kept."""


@dataclass(eq=False)
class _Session:
    name: str
    """Id; empty for a request without a session."""
    capture: Capture
    used: float = field(default_factory=lambda: time.monotonic())
    """Time of the latest request."""
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    answers: dict[bytes, Making] = field(default_factory=dict)
    """Latest answers, by the request: a client that repeats one gets the same answer."""


@dataclass(eq=False)
class Gateway:
    """Endpoints of the API over a function that samples. ::

        gateway = Gateway(sample, dialect, sampling=sampling, longest=4096, vocab_size=512)
        gateway.open_session("a")
        reply = await gateway.chat("a", body)
        choices = await reply.choices
        sequences = gateway.capture("a").log.sequences

    ``sampling`` has the defaults of requests. Prompt and answer have at most ``longest`` tokens.
    ``model`` is the only model; None takes every name. Answers of a session are captured even if
    their client has gone.
    """

    sample: Sample
    dialect: Dialect
    _: KW_ONLY
    sampling: Sampling
    longest: int
    vocab_size: int
    model: str | None = None
    enable_thinking: bool = True
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.sampling = replace(self.sampling, stop_token_ids=self.dialect.stop_token_ids)
        self._most_text = self.longest * max(map(len, self.dialect.tokenizer.get_vocab()))
        self._sessions: dict[str, _Session] = {}
        self._waiting = 0
        self.is_stopping = False
        """Whether :meth:`stop` was called."""
        self._work: set[asyncio.Future[list[Choice]]] = set()
        self._names = itertools.count(1)

    # Sessions.

    def open_session(self, name: str | None = None) -> str:
        """Begin a session; return its id. Raises ApiError if there are too many."""
        self._forget_idle()
        if len(self._sessions) >= self.limits.sessions:
            message = f"{len(self._sessions)} sessions are open; delete those that have ended"
            raise ApiError(429, message, code="too_many_sessions")
        name = name or secrets.token_hex(12)
        self._sessions[name] = _Session(name, Capture(self.dialect))
        return name

    def capture(self, name: str) -> Capture:
        """Return the conversations of a session. Raises ApiError if it is unknown."""
        return self._session(name).capture

    def close_session(self, name: str) -> None:
        """Forget a session, and end its answers in the making. Raises ApiError if it is unknown."""
        session = self._session(name)
        del self._sessions[name]
        for answer, _ in session.answers.values():
            answer.cancel()

    def stop(self) -> None:
        """End all answers in the making; their clients get an error."""
        self.is_stopping = True
        for work in self._work:
            work.cancel()

    # Endpoints.

    async def chat(self, name: str, body: bytes, *, is_retry: bool = False) -> Reply:
        """Answer ``/v1/chat/completions``. Raises ApiError."""
        request = await aside(len(body), lambda: read(ChatRequest, body))
        form = self._form(request, bool(request.logprobs))
        answers = await self._chat(name, body, request, is_retry=is_retry)
        stream = ChatStream(form) if request.stream else None
        return Reply(*answers, form.chat, stream, is_kept=bool(name))

    async def responses(self, name: str, body: bytes, *, is_retry: bool = False) -> Reply:
        """Answer ``/v1/responses``. Raises ApiError."""
        asked = await aside(len(body), lambda: read(ResponseRequest, body))
        form = self._form(asked, False)
        answers = await self._chat(name, body, asked.chat(), is_retry=is_retry)
        stream = ResponseStream(form, asked) if asked.stream else None
        return Reply(*answers, partial(response_of, form, asked), stream, is_kept=bool(name))

    async def _chat(
        self, name: str, body: bytes, request: ChatRequest, *, is_retry: bool
    ) -> Making:
        """Return the answers to ``request``, which came as ``body``."""
        session = self._session(name)
        top = request.top_count
        capture = session.capture

        def prepare() -> Work:
            schema = schema_of(request)
            opened = self._opened(capture, request)
            if schema and capture.parse(opened, []).is_reasoning_open:
                message = "response_format: the chat template begins each answer with a thought"
                param = "response_format"
                raise ApiError(400, message, code="unsupported_parameter", param=param)

            def has_call(tokens: list[int]) -> bool:
                calls = capture.parse(opened, tokens).tool_calls
                return any(not call.error for call in calls)

            def choose(completion: Completion) -> Choice:
                if request.parallel_tool_calls is False:
                    completion = until(has_call, completion)
                message = capture.answer(opened, completion, request.stops)
                return Choice(prompt=opened.tokens, completion=completion, message=message)

            options: dict[str, Any] = {"most": request.max_completion_tokens, "top_logprobs": top}
            options["json_schema"] = schema
            draft = partial(Draft, self.dialect, opened, request.stops)
            return self._work_of(session, request, opened.tokens, choose, draft, **options)

        return await self._answer(session, body, is_retry, prepare)

    async def completions(self, name: str, body: bytes, *, is_retry: bool = False) -> Reply:
        """Answer ``/v1/completions``. Raises ApiError."""
        request = await aside(len(body), lambda: read(CompletionRequest, body))
        session = self._session(name)
        form = self._form(request, request.logprobs is not None)

        def prepare() -> Work:
            work: Work = []
            for prompt in request.prompts():
                tokens, choose, draft = self._completed(session.capture, prompt, request)
                top = request.logprobs or 0
                echoed = request.logprobs if request.echo else None
                options = {"top_logprobs": top, "prompt_logprobs": echoed}
                work += self._work_of(session, request, tokens, choose, draft, **options)
            return work

        stream = CompletionStream(form) if request.stream else None
        answers = await self._answer(session, body, is_retry, prepare)
        return Reply(*answers, form.completions, stream, is_kept=bool(name))

    async def generate(self, name: str, body: bytes, *, is_retry: bool = False) -> Reply:
        """Answer ``/inference/v1/generate``. Raises ApiError."""
        request = await aside(len(body), lambda: read(GenerateRequest, body))
        params = request.sampling_params or SamplingParams()
        name = name or str((params.extra_args or {}).get("session", ""))
        session = self._session(name)
        form = self._form(request, params.logprobs is not None)
        tokens = request.token_ids or request.prompt_token_ids
        if not tokens:
            raise ApiError(400, "token_ids: give tokens", code="invalid_value", param="token_ids")

        def prepare() -> Work:
            return self._work_of(session, params, *self._completed(session.capture, tokens, params))

        answers = await self._answer(session, body, is_retry, prepare)
        return Reply(*answers, form.generated, None, is_kept=bool(name))

    # Work.

    def _session(self, name: str) -> _Session:
        if not name:
            return _Session(name, Capture(self.dialect, f"{secrets.token_hex(6)}_"))
        self._forget_idle()
        if name not in self._sessions:
            idle = f"deleted, or had no request for {self.limits.session_s:g} s"
            message = f"there is no session {name!r}, or it was {idle}; POST /sessions opens one"
            raise ApiError(404, message, code="session_not_found")
        return self._touched(name)

    def _touched(self, name: str) -> _Session:
        session = self._sessions[name] = self._sessions.pop(name)  # the latest one is the last
        session.used = time.monotonic()
        return session

    def _forget_idle(self) -> None:
        """Forget the sessions without a request for too long, unless they have open answers."""
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if session.used + self.limits.session_s > time.monotonic():
                return
            if all(answer.done() for answer, _ in session.answers.values()):
                del self._sessions[name]
            else:
                self._touched(name)

    def _opened(self, capture: Capture, request: ChatRequest) -> Opened:
        users = (message for message in request.messages if message.get("role") == "user")
        self._require_short(*(str(joined_text(message.get("content"))) for message in users))
        thinks = self.enable_thinking if request.thinks is None else request.thinks
        tools = request.tools if request.tool_choice != "none" else None
        forced = request.forced_tool()
        try:
            return capture.open(
                request.messages,
                tools,
                enable_thinking=thinks,
                variables=request.variables,
                forced=forced,
            )
        except ConversationError as error:
            raise ApiError(400, str(error), code="invalid_value", param="messages") from None

    def _require_short(self, *texts: str) -> None:
        """Raise ApiError if no encoding of ``texts`` is short enough."""
        if (length := sum(map(len, texts))) > self._most_text:
            raise context_exceeded(f"{length:,} characters", self.longest)

    def require_model(self, name: str | None) -> None:
        """Raise ApiError if ``name`` is another model than that of the gateway."""
        if self.model is not None and name not in (None, self.model):
            message = f"there is no model {name!r}; this server has {self.model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _form(self, request: Asked | GenerateRequest, logprobs: bool) -> Form:
        self.require_model(request.model)
        asked = isinstance(request, Asked)
        options = request.stream_options if isinstance(request, Asked) else None
        return Form(
            name=f"{ID_OF.get(type(request), 'gen')}-{next(self._names)}",
            model=request.model or self.model or "policy",
            dialect=self.dialect,
            logprobs=logprobs,
            token_ids=asked and bool(getattr(request, "return_token_ids", False)),
            usage=options is not None and bool(options.include_usage),
        )

    def _completed(
        self, capture: Capture, prompt: str | list[int], request: Sampled
    ) -> tuple[list[int], Choose, Callable[[], Draft]]:
        """Return the tokens of a prompt, the function that notes its completion, and the one that
        returns a draft of it.
        """
        if isinstance(prompt, str):
            self._require_short(prompt)
        tokens = capture.open_text(prompt) if isinstance(prompt, str) else prompt
        lead = ""
        if isinstance(request, CompletionRequest) and request.echo:
            lead = prompt if isinstance(prompt, str) else self.dialect.tokenizer.decode(prompt)

        def choose(completion: Completion) -> Choice:
            if isinstance(prompt, str):
                text = capture.answer_text(prompt, tokens, completion, request.stops)
            else:
                capture.add(tokens, completion)
                text = before(capture.decode(completion), request.stops)
            return Choice(prompt=tokens, completion=completion, text=lead + text)

        opened = Opened(tokens, b"")
        return tokens, choose, partial(Draft, self.dialect, opened, request.stops, lead)

    def _work_of(
        self,
        session: _Session,
        request: Asked | SamplingParams,
        tokens: list[int],
        choose: Choose,
        draft: Callable[[], Draft],
        **fields: Any,
    ) -> Work:
        """Return the answers to sample after the prompt ``tokens``. ``fields`` are those of the
        parameters of sampling that other parameters of the request give. Raises ApiError.
        """
        left = self.longest - len(tokens)
        if not tokens or not all(0 <= token < self.vocab_size for token in tokens):
            message = f"the prompt must have tokens, each below {self.vocab_size}"
            raise ApiError(400, message, code="invalid_value", param="prompt")
        if left < 1:
            raise context_exceeded(f"{len(tokens)} tokens", self.longest)
        if session.capture.tokens >= self.limits.session_tokens:
            message = f"the session has {session.capture.tokens} tokens; open another one"
            raise ApiError(429, message, code="session_full")
        sampling = request.sampling(self.sampling, left, **fields)
        seed = request.seed
        if seed is None or seed == -1:
            seed = secrets.randbits(62)
        work: Work = []
        for number in range(request.n or 1):
            partial_answer = draft() if isinstance(request, Asked) and request.stream else None
            ask = Ask(
                session=session.name,
                tokens=tokens,
                sampling=sampling,
                seed=sample_seed(seed, number),
                on_tokens=partial_answer.hear if partial_answer is not None else None,
            )
            work.append((ask, choose, partial_answer))
        return work

    async def _answer(
        self, session: _Session, body: bytes, is_retry: bool, prepare: Callable[[], Work]
    ) -> Making:
        """Return the choices in the making; a repeated request gets those of the first one."""
        digest = hashlib.blake2b(body).digest()
        async with session.order:
            known = session.answers.get(digest) if is_retry else None
            if known and not (known[0].done() and (known[0].cancelled() or known[0].exception())):
                return known
            work = await aside(len(body), prepare)
            if self._waiting + len(work) > self.limits.waiting:
                message = f"{self._waiting} answers are being sampled; try again later"
                raise ApiError(429, message, code="too_many_requests")
            self._waiting += len(work)
            future = asyncio.ensure_future(self._choices(session, work))
            self._work.add(future)
            future.add_done_callback(self._done)
            drafts = [draft for *_, draft in work if draft is not None]
            session.answers[digest] = future, drafts
            while len(session.answers) > REMEMBERED:
                del session.answers[next(iter(session.answers))]
            return future, drafts

    def _done(self, future: asyncio.Future[list[Choice]]) -> None:
        self._work.discard(future)
        if not future.cancelled():
            future.exception()  # known, also if the client has gone

    async def _choices(self, session: _Session, work: Work) -> list[Choice]:
        try:
            completions = await asyncio.gather(*(self.sample(ask) for ask, *_ in work))
        finally:
            self._waiting -= len(work)
        pairs = [*zip(work, completions, strict=True)]
        async with session.order:
            size = size_of(completions)
            return await aside(size, lambda: [choose(done) for (_, choose, _), done in pairs])
