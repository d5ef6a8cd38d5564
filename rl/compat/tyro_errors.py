"""Errors of tyro's command line as events, which hold what the printed errors say."""

from tyro._errors import (
    BadValue,
    InstantiationFailure,
    InvalidChoice,
    ParseErrorEvent,
    SubcommandConflict,
    UnrecognizedArgs,
    on_parse_error,
)

__all__ = [
    "BadValue",
    "InstantiationFailure",
    "InvalidChoice",
    "ParseErrorEvent",
    "SubcommandConflict",
    "UnrecognizedArgs",
    "on_parse_error",
]
