"""Every value of a config by its full name, and checks of its declared type and its rule."""

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from rl.config.other_names import refusal
from rl.errors import require, require_value
from rl.training.titan_fields import titan_rules
from rl.types.rules import Bounds, Effect, Fixed, NeedsCuda, defaults_of, rule_of

FINITE = Bounds(-math.inf, math.inf, above=True, below=True)
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    NoneType: "None",
}


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """One value of a config: a section, or a leaf of one."""

    name: str
    """Full name, such as ``rollout.max_tokens`` or ``roles.teacher.model.dim``."""
    content: Any
    hint: Any
    """Declared type, ``Annotated`` metadata included."""
    bounds: Bounds | None
    effect: Effect | None
    owner: type | None = None
    """Dataclass that declares the field; None for an element of a list or dict."""

    @property
    def docstring(self) -> str:
        """Docstring of the field; empty if it has none."""
        field = self.name.rpartition(".")[2]
        return docstrings_of(self.owner).get(field, "") if self.owner else ""


def validate_types(config: Any) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if a value is not of its field's
    type, or if a part has an attribute that is not a field of it.
    """
    validate_attributes(config)
    for value in values(config):
        fits = any(_is_a(value.content, member) for member in _members(value.hint))
        require_value(fits, value.name, value.content, kinds_text(value.hint))


def validate_attributes(config: Any) -> None:
    """Raise ConfigError, naming the section, if an attribute of a part is not a field of it."""
    for name, content in ((value.name, value.content) for value in values(config)):
        if dataclasses.is_dataclass(content) and not isinstance(content, type):
            for attribute in getattr(content, "__dict__", ()):
                text = refusal(type(content), attribute)
                require(not text, text, field=name or type(content).__name__)


def validate_numbers(config: Any) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if a number is out of bounds.

    A number without bounds must be finite.
    """
    for value in values(config):
        if _is_number(value.content):
            allowed = (value.bounds or FINITE).complaint(value.content)
            require_value(not allowed, value.name, value.content, allowed)


def validate_unused(config: Any) -> None:
    """Raise ConfigError, naming field, value and what to use instead, if a field that changes
    nothing is not at its default, or if a value needs CUDA and the run is on CPU.
    """
    for value in values(config):
        if fixed := rule_of(value.hint, Fixed):
            holds = value.content == fixed.default
            require_value(holds, value.name, value.content, repr(fixed.default), fixed.fix)
        if (rule := rule_of(value.hint, NeedsCuda)) and config.hardware.kind == "cpu":
            holds = value.content not in rule.values
            require_value(holds, value.name, value.content, f"{rule.otherwise} on CPU")
    defaults = defaults_of(type(config))  # type: ignore[arg-type]
    for name, fix in config.unused().items():
        section, _, field = name.partition(".")
        leaves = _leaves(value_of(config, name), name)
        usual = _leaves(value_of(defaults[section], field), name)
        for leaf in leaves | usual:
            content = leaves.get(leaf)
            default = usual.get(leaf)
            require_value(content == default, leaf, content, repr(default), fix)


def check(config: Any, field: str, holds: bool, allowed: str, fix: str = "") -> None:
    """Raise ConfigError unless ``holds``: whether the value of ``field`` can work."""
    if not holds:
        require_value(holds, field, value_of(config, field), allowed, fix)


def value_of(config: Any, name: str) -> Any:
    """Return the value of a config by its full name; ``config`` itself for an empty name."""
    for key in filter(None, name.split(".")):
        if isinstance(config, list | tuple):
            config = config[int(key)]
        else:
            config = config[key] if isinstance(config, dict) else getattr(config, key)
    return config


def _leaves(content: Any, name: str) -> dict[str, Any]:
    """Return the values below ``content`` that hold no other, by name."""
    inner = values(content, Any, name)
    return {
        value.name: value.content
        for value in inner
        if not isinstance(value.content, dict | list | tuple)
        and not dataclasses.is_dataclass(value.content)
    }


def choices_of(hint: Any) -> list[Any]:
    """Return the values that a field of this type is limited to; empty if it is not."""
    literals = (member for member in _members(hint) if get_origin(member) is Literal)
    return [choice for member in literals for choice in get_args(member)]


def values(
    content: Any,
    hint: Any = None,
    name: str = "",
    effect: Effect | None = None,
    bounds: Bounds | None = None,
    owner: type | None = None,
) -> Iterator[ConfigValue]:
    """Yield every value of a config dataclass, sections before what they hold. The other arguments
    are of one section: ``effect`` and ``bounds`` apply if ``hint`` has none.
    """
    hint = type(content) if hint is None else hint
    effect = rule_of(hint, Effect) or effect
    bounds = rule_of(hint, Bounds) or bounds
    yield ConfigValue(name, content, hint, bounds, effect, owner)
    prefix = f"{name}." if name else ""
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        owner = type(content)
        for field, kind in fields_of(owner):
            yield from values(getattr(content, field), kind, prefix + field, effect, None, owner)
    elif isinstance(content, dict):
        by_key = rule_of(hint, dict) or {}
        for key, item in content.items():
            yield from values(item, _element(hint, 1), f"{prefix}{key}", effect, by_key.get(key))
    elif isinstance(content, (list, tuple)):
        for index, item in enumerate(content):
            yield from values(item, _element(hint, 0), f"{prefix}{index}", effect, bounds)


@cache
def fields_of(kind: type) -> list[tuple[str, Any]]:
    """Return names and types of a dataclass's fields, with the rules of torchtitan's.

    A default of None allows None, whatever the annotation says.
    """
    hints = get_type_hints(kind, include_extras=True)
    for name, rules in titan_rules(kind).items():
        hints[name] = Annotated[(hints[name], *rules)]
    return [
        (field.name, hints[field.name] | None if field.default is None else hints[field.name])
        for field in dataclasses.fields(kind)
    ]


@cache
def docstrings_of(kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, by name; empty for other types."""
    if not dataclasses.is_dataclass(kind):
        return {}
    texts = {name: text for base in kind.__bases__ for name, text in docstrings_of(base).items()}
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    for above, below in pairwise(body.body):
        match above, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def _members(hint: Any) -> list[Any]:
    """Return the types that a union consists of, without metadata."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [member for part in get_args(hint) for member in _members(part)]
    return [hint]


def _element(hint: Any, place: int) -> Any:
    """Return argument number ``place`` of a container type: 0 for a list or tuple, 1 for a dict."""
    parts = next((get_args(member) for member in _members(hint) if get_args(member)), ())
    return parts[place] if len(parts) > place else Any


def _is_a(content: Any, kind: Any) -> bool:
    """Whether ``content`` is of ``kind``. True for kinds without a check."""
    if get_origin(kind) is Literal:
        return content in get_args(kind)
    if kind is float:
        return _is_number(content)
    if kind is int:
        return isinstance(content, int) and not isinstance(content, bool)
    kind = get_origin(kind) or kind
    if kind in (list, tuple):
        return isinstance(content, (list, tuple))
    known = kind in (bool, str, NoneType, dict) or dataclasses.is_dataclass(kind)
    return not known or isinstance(content, kind)


def kinds_text(hint: Any) -> str:
    """Return the kinds of value that a field of this type may have, in words."""
    names: list[str] = []
    for member in _members(hint):
        if get_origin(member) is Literal:
            names += map(repr, get_args(member))
        else:
            names.append(_NAMES.get(member) or f"a {getattr(member, '__qualname__', member)}")
    return " or ".join(dict.fromkeys(names))


def _is_number(content: Any) -> bool:
    return isinstance(content, (int, float)) and not isinstance(content, bool)
