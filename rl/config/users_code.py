"""Line of the user's own code that an exception comes from."""

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.config.other_names import hint
from rl.errors import ConfigError

_FOREIGN = (
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<",
)
"""Paths of code that is not the user's: Python, its packages, Tiller, and code without a file."""


def place_of(error: BaseException) -> str:
    """Return file, line and function of the innermost frame of the user's own code. If the user's
    code has no frame, return those of the innermost frame.

    Frames of another process, which are in the text of the error, count too.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = _frames(error)
    for file, line, function in (_users(frames) or frames)[-1:]:
        return f"{file}, line {line}, in {function}"
    return "an unknown place"


def is_users(error: BaseException) -> bool:
    """Whether a frame of the user's own code is among those of ``error``."""
    return bool(_users(_frames(error)))


def _frames(error: BaseException) -> list[tuple[str, str, str]]:
    """Return file, line and function of each frame, the innermost last."""
    text = "".join(traceback.format_exception(error))
    return re.findall(r'File "(.+)", line (\d+), in (.+)', text)


def _users(frames: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [frame for frame in frames if not frame[0].startswith(_FOREIGN)]


def users_error(what: str, error: BaseException, *, field: str = "") -> ConfigError:
    """Return a ConfigError with ``error`` and the line of the user's code that raised it. ``field``
    is the field that names the code, by default ``what``.
    """
    last = traceback.format_exception_only(error)[-1].strip().partition(": ")[2]
    text = (error.msg if isinstance(error, SyntaxError) else last) or "no message"
    problem = f"{what}: {place_of(error)}: {type(error).__name__}: {text}{hint(text)}"
    return ConfigError(problem, field=field or what, fix="correct it there")


@contextmanager
def users_code(what: str, *, field: str = "") -> Iterator[None]:
    """Turn an exception of the user's code inside the block into :func:`users_error`."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise users_error(what, error, field=field) from error
