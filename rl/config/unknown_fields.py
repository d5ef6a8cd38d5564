"""Refusal of attributes that a config dataclass does not declare, such as a misspelt field."""

import dataclasses
from functools import cached_property
from typing import Any, get_args, get_type_hints

from rl.config.other_names import hint
from rl.errors import nearest


def refusal(kind: type, name: str) -> str:
    """Return why configs of ``kind`` have no attribute ``name``; empty if they may have it.

    Names that begin with ``_`` are free, for caches.
    """
    fields = {field.name for field in dataclasses.fields(kind)}
    declared = getattr(kind, name, None)
    if name in fields or name.startswith("_") or isinstance(declared, cached_property):
        return ""
    if hasattr(declared, "__set__"):  # a property
        return ""
    text = f"{kind.__qualname__} has no attribute {name!r}"
    near = nearest(name, fields) or f"its fields are {', '.join(sorted(fields))}"
    return text + (hint(text) or f"; {near.rstrip()}")


def refuse_unknown(kind: Any) -> None:
    """Let configs of ``kind``, of its subclasses, and of the kinds of its fields refuse unknown
    attributes and arguments, with or without ``slots``.
    """
    if dataclasses.is_dataclass(kind) and "__setattr__" not in vars(kind):
        kind.__setattr__ = _set  # type: ignore[method-assign, assignment]
        kind.__new__ = _new  # type: ignore[method-assign, assignment]
        for inner in get_type_hints(kind).values():
            refuse_unknown(inner)
    for argument in get_args(kind):
        refuse_unknown(argument)


def _new(kind: Any, *_: Any, **given: Any) -> Any:
    for text in filter(None, (refusal(kind, name) for name in given)):
        raise TypeError(text)
    return object.__new__(kind)


def _set(config: Any, name: str, value: Any) -> None:
    if text := refusal(type(config), name):
        raise AttributeError(text, name=name, obj=config)
    object.__setattr__(config, name, value)
