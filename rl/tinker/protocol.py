"""JSON bodies of Tinker's requests: keyword arguments of the functions that serve them, checked.

Fields that no argument names are refused, unless they change nothing.
"""

import inspect
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, create_model

from rl.errors import shown
from rl.gateway.protocol import Strict, unnamed
from rl.tinker.errors import UserError
from rl.types import MAX_TEMPERATURE, MAX_TOP_LOGPROBS
from rl.types.rules import LEAST_EPS

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
"""Names of checkpoints. A path ``tinker://MODEL/KIND/NAME`` has exactly three parts."""
MAX_JSON = 2**16
"""Maximum size of metadata, as JSON."""
IGNORED = {
    *("type", "tags", "sdk_version", "project_id", "destination_project_id", "detail", "name"),
    *("weights_access_token", "model_id", "seq_id", "session_id", "base_model", "model_path"),
    *("sampling_session_id", "optimizer_config"),
}
"""Fields that change nothing where no argument has their name."""


def finite_json(value: Any) -> Any:
    """Return ``value``. Raises ValueError if it has NaN, or more than MAX_JSON bytes."""
    size = len(json.dumps(value, allow_nan=False))
    if size > MAX_JSON:
        raise ValueError(f"it has {size:,} bytes, and may have {MAX_JSON:,}")
    return value


Text = Annotated[str, StringConstraints(max_length=1000)]
Number = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[int, Field(ge=1, le=2**53)]
Metadata = Annotated[dict[Text, Any], Field(max_length=100), AfterValidator(finite_json)] | None
Seconds = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)] | None
"""Lifetime of a checkpoint; None if it does not expire."""
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tops = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Samples = Annotated[int, Field(ge=1, le=1024)]
Tokens = Annotated[list[Token], Field(max_length=64)]
Texts = Annotated[list[Text], Field(max_length=64)]
Size = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=1000)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Body(Strict):
    """Base of all bodies and their parts."""


class Lora(Body):
    """Adapter of a model."""

    rank: Annotated[int, Field(ge=1, le=65536)] = 32
    seed: Number | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """Optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class Adam(Body):
    """Options of a step of AdamW. A ``grad_clip_norm`` of 0 does not clip."""

    learning_rate: Rate = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Annotated[float, Field(ge=LEAST_EPS)] = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Size = 0.0


class Chunk(Body):
    """Tokens of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Token]


class Prompt(Body):
    """Prompt of a sample."""

    chunks: list[Chunk]


class SamplingParams(Body):
    """Parameters of sampling. ``stop`` None stops at the model's own tokens, [] never."""

    max_tokens: Positive | None = None
    seed: int | None = None
    stop: Text | Tokens | Texts | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Targets(Body):
    """Integers, dense or in compressed rows."""

    data: list[int]
    dtype: Literal["int64"]
    shape: list[Number] | None = None
    sparse_crow_indices: list[Number] | None = None
    sparse_col_indices: list[Number] | None = None


class LossInput(Body):
    """Input of a custom loss."""

    name: Text
    rank: Literal[0, 1, 2]


class Client(Body):
    """Client of a sampler."""

    sampling_session_id: Text
    cloned_sampler_id: Number = 0


def sample_head(*, sampling_session_id: Text, seq_id: Number, num_samples: Samples = 1) -> None:
    """Have the fields of a sample without which it cannot be promised."""


@cache
def _kind(function: Callable[..., Any]) -> type[Body]:
    """Return the class of bodies with the keyword arguments of ``function``."""
    fields: dict[str, Any] = {
        param.name: (param.annotation, ... if param.default is param.empty else param.default)
        for param in inspect.signature(function).parameters.values()
        if param.kind is param.KEYWORD_ONLY
    }
    return create_model(function.__name__, __base__=Body, **fields)


def read(function: Callable[..., Any], body: bytes, *, whole: bool = True) -> dict[str, Any]:
    """Return the keyword arguments of ``function`` that ``body`` gives. Other fields are refused
    if ``body`` is to be read as a ``whole``. Raises UserError, naming the field.
    """
    try:
        model = _kind(getattr(function, "__func__", function)).model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the body"
        raise UserError(f"{field} is {shown(first['input'])}: {first['msg']}") from None
    for name, _ in unnamed(model) if whole else ():
        if name not in IGNORED:
            raise UserError(f"{name} is not supported; leave it out")
    return {name: getattr(model, name) for name in type(model).model_fields}
