"""Requests of the API, checked, and its errors."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl.errors import shown
from rl.types import MAX_TEMPERATURE, MAX_TOP_LOGPROBS, MIN_TEMPERATURE, Sampling

MAX_CHOICES = 64
"""Maximum of ``n``."""
HEATS = f"it must be 0 or at least {MIN_TEMPERATURE}"
LARGE = 2**14
"""Size of the bodies that are read in the event loop."""
MAX_PROMPTS = 64
"""Maximum number of prompts of one request for completions."""
IGNORED = {
    *("metadata", "prompt_cache_key", "safety_identifier", "service_tier"),
    *("store", "user", "request_id", "priority", "cache_salt", "summary"),
}
"""Parameters that change no token."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([],),
    "detokenize": (True, False),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "include_obfuscation": (True, False),
    "return_tokens_as_token_ids": (False,),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Parameters that are not supported, with the values that change nothing."""

Request = TypeVar("Request", bound="Strict")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a gateway. A request beyond one gets a typed error."""

    body_bytes: int = 16 * 2**20
    """Maximum size of the body of a request."""
    waiting: int = 1024
    """Maximum number of answers that are sampled or wait for it."""
    sessions: int = 4096
    """Maximum number of open sessions."""
    session_tokens: int = 10**7
    """Maximum number of tokens of all prompts and answers of a session."""
    session_s: float = 3600.0
    """Time without a request after which a session is forgotten, in s."""


class ApiError(Exception):
    """Error that a client gets, in the form of OpenAI's API."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that a client gets."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def context_exceeded(length: str, most: int) -> ApiError:
    """Return the error of a prompt of ``length``, such as "9 tokens", that leaves no room for an
    answer, in the words by which client libraries recognise it.
    """
    message = (
        f"This model's maximum context length is {most} tokens. However, your messages resulted in "
        f"{length}: the prompt is too long, and leaves no room for an answer. Please reduce "
        "the length of the messages."
    )
    return ApiError(400, message, code="context_length_exceeded", param="messages")


class Strict(BaseModel):
    """Part of a request. Unknown parameters are refused unless they change no token."""

    model_config = ConfigDict(
        extra="allow", allow_inf_nan=False, strict=True, protected_namespaces=()
    )


class Sampled(Strict):
    """Parameters of sampling; None means the default of the server."""

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """None and -1 draw a seed."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion; None and an empty list mean those of the dialect."""
    stop: str | list[str] | None = None
    """Texts that end a completion, and are not part of its text."""
    min_tokens: int | None = Field(default=None, ge=0)
    """Number of tokens before which no stop token is sampled."""
    ignore_eos: bool | None = None
    """Whether the stop tokens of the dialect end no completion."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts of ``stop`` that are not empty."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    def sampling(
        self, default: Sampling, left: int, *, most: int | None = None, **fields: Any
    ) -> Sampling:
        """Return the parameters of an answer of at most ``left`` tokens. ``most`` is another name
        of ``max_tokens``, ``fields`` are those that other parameters give. Raises ApiError.
        """
        most = min(most or self.max_tokens or default.max_tokens, left)
        least = self.min_tokens or 0
        stops = () if self.ignore_eos else default.stop_token_ids
        schema = fields.get("json_schema")
        for name, is_wrong, rule in (
            ("temperature", 0 < (self.temperature or 0) < MIN_TEMPERATURE, HEATS),
            ("min_tokens", least > most, f"it may be {most}, as max_tokens"),
            ("min_tokens", least and self.stops, "it does not go with stop"),
            ("min_tokens", least and schema, "it does not go with response_format"),
            ("ignore_eos", self.ignore_eos and schema, "it does not go with response_format"),
        ):
            if is_wrong:
                message = f"{name} is {getattr(self, name)}; {rule}"
                raise ApiError(400, message, code="invalid_value", param=name)
        return replace(
            default,
            max_tokens=most,
            min_tokens=least,
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_p=default.top_p if self.top_p is None else self.top_p,
            top_k=default.top_k if self.top_k is None else max(self.top_k, 0),
            min_p=default.min_p if self.min_p is None else self.min_p,
            stop_token_ids=tuple(self.stop_token_ids or stops),
            stop=self.stops,
            **fields,
        )


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class Asked(Sampled):
    """Parameters of all endpoints that sample."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Whether to add ``prompt_token_ids``, and ``token_ids`` to each choice."""


class TemplateOptions(Strict):
    """Options of the chat template."""

    enable_thinking: bool | None = None


class JsonSchema(Strict):
    """Schema of an answer. ``strict`` False is followed too."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Strict):
    """Form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ToolName(Strict):
    """Name of a tool."""

    name: str


class ToolChoice(Strict):
    """Tool that an answer has to call."""

    type: Literal["function"]
    function: ToolName


class ChatRequest(Asked):
    """Body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """If False, an answer ends with its first tool call."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: TemplateOptions | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Effort of thinking, for chat templates that read it; with "none" no thought is sampled."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Length of what is written, for chat templates that read it."""

    @property
    def thinks(self) -> bool | None:
        """Whether the answer may begin with a thought; None for the default of the server."""
        form = self.response_format
        if self.reasoning_effort == "none" or (form and form.type != "text"):
            return False
        options = self.chat_template_kwargs
        return options.enable_thinking if options else None

    @property
    def variables(self) -> dict[str, str]:
        """More variables of the chat template, with their values."""
        effort = self.reasoning_effort if self.reasoning_effort != "none" else None
        values = {"reasoning_effort": effort, "verbosity": self.verbosity}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def top_count(self) -> int:
        """Number of most likely tokens to return at each token. Raises ApiError if there is one
        without ``logprobs``.
        """
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true"
            raise ApiError(400, message, code="invalid_value", param="top_logprobs")
        return self.top_logprobs or 0

    def forced_tool(self) -> tuple[str | None] | None:
        """Return the name of the tool that an answer has to call, None in it for any of them; None
        if it need not call any. Raises ApiError if there is no such tool, or if a tool is no
        function with a name.
        """
        names = []
        for index, tool in enumerate(self.tools or []):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if tool.get("type", "function") != "function" or not isinstance(name, str):
                param = f"tools.{index}"
                form = '{"type": "function", "function": {"name": …}}'
                message = f"{param} is {shown(tool)}; only functions are tools: write {form}"
                raise ApiError(400, message, code="invalid_value", param=param)
            names.append(name)
        choice = self.tool_choice
        if choice in (None, "auto", "none"):
            return None
        name = choice.function.name if isinstance(choice, ToolChoice) else None
        if names and (name is None or name in names):
            return (name,)
        message = f"tool_choice: the tools are {', '.join(names) or 'none'}; name one, or 'auto'"
        raise ApiError(400, message, code="invalid_value", param="tool_choice")


class CompletionRequest(Asked):
    """Body of ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Number of most likely tokens to return at each token, beside the sampled one."""
    echo: bool | None = None
    """Whether the text, and with ``logprobs`` the log-probs, begin with those of the prompt."""

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Raises ApiError if there are too few or too many."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        if 1 <= len(prompt) <= MAX_PROMPTS:
            return [*prompt]  # type: ignore[list-item]
        message = f"prompt: give 1 to {MAX_PROMPTS} prompts"
        raise ApiError(400, message, code="invalid_value", param="prompt")


class SamplingParams(Sampled):
    """Parameters of sampling of ``/inference/v1/generate``."""

    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    logprobs: Literal[0, 1] | None = None
    extra_args: dict[str, Any] | None = None
    """``session`` in it is the session of the request, if the URL has none."""


class GenerateRequest(Strict):
    """Body of ``/inference/v1/generate``; ``prompt_token_ids`` is another name of ``token_ids``."""

    model: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    sampling_params: SamplingParams | None = None
    stream: Literal[False] | None = None


async def aside(size: int, work: Callable[[], Result]) -> Result:
    """Return ``work()`` on a body of ``size`` bytes; a large one would hold up other clients in the
    event loop.
    """
    return await asyncio.to_thread(work) if size > LARGE else work()


def read(kind: type[Request], body: bytes) -> Request:
    """Return ``body`` as a request. Raises ApiError, naming the first parameter that is wrong."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            message = f"the body is not JSON: {first['msg']}"
            raise ApiError(400, message, code="invalid_json") from None
        param = ".".join(map(str, first["loc"])) or None
        value = "" if first["type"] == "missing" else f" is {shown(first['input'])}"
        message = f"{param or 'the body'}{value}: {first['msg']}"
        raise ApiError(400, message, code="invalid_value", param=param) from None
    for name, value in unnamed(request):
        if not (value is None or name in IGNORED or value in NEUTRAL.get(name, ())):
            message = f"{name} is not supported; leave it out"
            raise ApiError(400, message, code="unsupported_parameter", param=name)
    return request


def unnamed(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a body, and of its parts, that their classes do not name."""
    if isinstance(part, BaseModel):
        yield from (part.model_extra or {}).items()
        part = [getattr(part, name) for name in type(part).model_fields]
    for child in part if isinstance(part, list) else ():
        yield from unnamed(child)


def sample_seed(seed: int, number: int) -> int:
    """Return the seed of sample ``number`` of a request with ``seed``: ``seed`` for the first one.
    Requests with other seeds have none of these.
    """
    if not number:
        return seed % 2**63
    text = f"{seed}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % 2**63
