"""Typed Python functions as tools that a policy calls, and a tool that runs its programs."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from rl.errors import ConfigError, RunError, error_text, name_of, shown
from rl.host.threads import in_thread
from rl.sandbox.elsewhere import sandbox_at
from rl.sandbox.sandbox import open_sandbox
from rl.sandbox.sandboxed_program import Limits, Result

if TYPE_CHECKING:
    from pydantic import BaseModel

MAX_CHARS = 8192


@dataclass(frozen=True, slots=True)
class _Tool:
    call: Callable[..., Any]
    arguments: "type[BaseModel]"
    schema: Mapping[str, Any]


@dataclass(eq=False)
class Tools:
    """Tools of an environment::

        def add(a: int, b: int) -> int:
            \"\"\"Return the sum of two numbers.\"\"\"
            return a + b

        tools = Tools([add])
        opening = Opening(messages, tools.schemas)
        messages = tools.answer(message)       # one of role ``tool`` for each call

    A function's name, docstring and annotations become the schema of its tool. An object with
    ``__call__`` has the name of its class. The schema of a ``functools.partial`` leaves out the
    arguments that it binds. All functions run in the thread of the caller; coroutine functions run
    on an event loop of their own.

    The policy gets an error as the tool's answer if

    - no tool has the name of the call,
    - the arguments do not match the annotations,
    - the function raises an exception.

    A failure that is not the policy's is not an answer: if a function raises
    :class:`rl.errors.InfrastructureError`, or another RunError, the episode is lost.

    Raises ConfigError if a function cannot be described.
    """

    functions: Sequence[Callable[..., Any]]
    max_chars: int = MAX_CHARS
    """Maximum length of an answer, in characters. Longer answers are cut off, with a note at the
    end."""
    _tools: dict[str, _Tool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._tools = {}
        for function in self.functions:
            name = name_of(function)
            if name in self._tools:
                raise ConfigError(f"two tools have the name {name!r}; rename one of them")
            self._tools[name] = _described(function)

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """JSON schemas of all tools, in the form of the Chat Completions API."""
        return [tool.schema for tool in self._tools.values()]

    def answer(self, message: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the answers to the tool calls of ``message``, in order; [] without calls."""
        calls = [call["function"] for call in message.get("tool_calls", ())]
        texts = [self.call(call["name"], call["arguments"]) for call in calls]
        return [{"role": "tool", "content": text} for text in texts]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the answer of tool ``name`` as text, or its error as text. Raises RunError."""
        from pydantic import ValidationError

        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools)
            return self._bounded(f"error: there is no tool {name!r}; the tools are {known}")
        try:
            model = tool.arguments.model_validate_json(json.dumps(arguments), strict=True)
        except ValidationError as error:
            problems = [
                f"argument {'.'.join(map(str, detail['loc']))}: {detail['msg']}, "
                f"not {shown(detail['input'])}"
                for detail in error.errors()
            ]
            return self._bounded(f"error: {'; '.join(problems)}")
        fields = type(model).model_fields.items()
        values = {str(info.alias): getattr(model, key) for key, info in fields}
        try:
            result = tool.call(**values)
            if inspect.iscoroutine(result):
                result = in_thread(asyncio.run, result).result()  # a loop may run in this one
            if not isinstance(result, str):
                result = json.dumps(result, ensure_ascii=False, default=str)
            return self._bounded(result)
        except RunError:  # such as a sandbox that cannot start a program
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return self._bounded(f"error: {error_text(error)}")

    def _bounded(self, text: str) -> str:
        if len(text) <= self.max_chars:
            # No tokenizer takes half of a surrogate pair, as os.listdir may return it.
            return text.encode(errors="backslashreplace").decode()
        return (
            f"{text[: self.max_chars]}… (cut off after {self.max_chars} of {len(text)} characters)"
        )


def _described(function: Callable[..., Any]) -> _Tool:
    """Return the tool of ``function``. Raises ConfigError."""
    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    name = name_of(function)
    bound = function.keywords if isinstance(function, partial) else {}
    inner = function.func if isinstance(function, partial) else function
    on_object = inspect.isroutine(inner) or not type(inner).__call__.__doc__
    description = inspect.getdoc(inner if on_object else type(inner).__call__)
    if not description:
        raise ConfigError(f"tool {name!r} has no docstring; write one for the policy to read")
    fields: dict[str, Any] = {}
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    for number, parameter in enumerate(param for param in parameters if param.name not in bound):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name!r} takes {parameter}; give each parameter a name")
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"tool {name!r}: {parameter.name!r} has no type; annotate it")
        default = ... if parameter.default is parameter.empty else parameter.default
        # pydantic has names of its own, and no fields that begin with an underscore
        alias = Field(alias=parameter.name)
        kind = Annotated[parameter.annotation, alias]  # type: ignore[name-defined]
        fields[f"parameter{number}"] = (kind, default)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        described = _untitled(model.model_json_schema())
    except (PydanticUserError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"tool {name!r} has no JSON schema: {reason}") from error
    schema = {"name": name, "description": description, "parameters": described}
    return _Tool(function, model, {"type": "function", "function": schema})


def _untitled(schema: Any) -> Any:
    """Return ``schema`` without titles, which only repeat names."""
    if isinstance(schema, list):
        return [_untitled(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {key: part for key, part in schema.items() if key != "title" or isinstance(part, dict)}
    return {key: _untitled(part) for key, part in shown.items()}


def code_tool(
    *, limits: Limits | None = None, unsafe: bool = False, at: str = ""
) -> Callable[[str], str]:
    """Return the tool ``python(code)`` for :class:`Tools`.

    Each call runs a program of its own in a sandbox, within ``limits``. Its answer has what the
    program printed, the end of its error, and the limit that it ran into. ``at`` is the place of a
    sandbox that is not this host's: see :func:`rl.sandbox.elsewhere.sandbox_at`.

    Raises ConfigError if no sandbox works on this host, unless ``unsafe`` is True: programs can
    then read and change whatever the run can.
    """
    sandbox = sandbox_at(at) if at else open_sandbox(unsafe=unsafe)
    most = limits or Limits()

    def python(code: str) -> str:
        """Run a Python program, and return what it prints. It has the standard library, and no
        network.
        """
        return _printed(sandbox.run(code, limits=most), most)

    return python


def _printed(result: Result, limits: Limits) -> str:
    parts = [result.stdout, result.stderr]
    if result.limit is not None:
        parts.append(f"(the program ran into its limit of {result.limit}: {limits})")
    elif result.exit_code:
        parts.append(f"(exit code {result.exit_code})")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "(the program printed nothing)"
