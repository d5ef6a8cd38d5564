"""Errors that end a run, with their exit codes, and errors that a run survives."""

import contextlib
import difflib
import errno
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_AGAIN = 75
EXIT_INTERRUPTED = 130
CLEAN_UP_S = 5
LONGEST_REPR = 200
TOO_MANY_FILES = "TooManyOpenFiles"
MOST_FILES = 2**20
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}

at_end: list[Callable[[], object]] = []
"""Clean-ups that ``end_program`` calls, for resources that would outlive the process. Their errors
are ignored."""
os.register_at_fork(after_in_child=at_end.clear)  # only the parent cleans up


def end_program(code: int) -> NoReturn:
    """End this process with ``code`` at once. A normal exit of Python takes more than a second to
    unload torch.
    """
    signal.alarm(CLEAN_UP_S)  # ends the process if a clean-up hangs, such as on lost storage
    for clean_up in [*at_end, sys.stdout.flush, sys.stderr.flush]:
        with contextlib.suppress(Exception):
            clean_up()
    os._exit(code)


class ConfigError(ValueError):
    """Error in the config or in its input; raised before any process starts.

    The error is data: a ``field`` or another place, and a ``fix`` or reason. What is wrong is

    - the ``value`` of the field, if ``allowed`` says which values are right;
    - ``problem`` otherwise.
    """

    def __init__(
        self,
        problem: str = "",
        *,
        field: str = "",
        value: object = None,
        allowed: str = "",
        fix: str = "",
    ):
        self.problem = problem
        self.field = field
        self.value = value
        self.allowed = allowed
        self.fix = fix
        place = "" if self.fault.startswith(field) else f"{field}: "
        super().__init__(printable("; ".join(filter(None, [place + self.fault, self.remedy]))))

    @property
    def fault(self) -> str:
        """Field and value, or the problem."""
        if not self.allowed:
            return self.problem
        value = self.value.__qualname__ if isinstance(self.value, type) else shown(self.value)
        return f"{self.field} is {value}"

    @property
    def remedy(self) -> str:
        """Allowed values, and the fix; empty if neither is known."""
        rule = f"it must be {self.allowed}" if self.allowed else ""
        return ": ".join(filter(None, [rule, self.fix]))

    def inside(self, place: str) -> "ConfigError":
        """Return the same error with ``place`` before its field."""
        field = ": ".join(filter(None, [place, self.field]))
        problem = self.problem
        if self.field and problem.startswith(self.field):
            problem = f"{place}: {problem}"
        return ConfigError(
            problem, field=field, value=self.value, allowed=self.allowed, fix=self.fix
        )


def require(condition: bool, problem: str, *, field: str = "", fix: str = "") -> None:
    """Raise ConfigError with these data unless ``condition`` holds."""
    if not condition:
        raise ConfigError(problem, field=field, fix=fix)


def require_value(holds: bool, field: str, value: object, allowed: str, fix: str = "") -> None:
    """Raise ConfigError with these data unless ``holds``."""
    if not holds:
        raise ConfigError(field=field, value=value, allowed=allowed, fix=fix)


def nearest(name: str, known: Collection[str], *, prefix: str = "") -> str:
    """Return "did you mean …? " with the known names nearest to ``name``; empty if none is near."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(prefix + match for match in near)}? " if near else ""


def one_of(values: Iterable[object]) -> str:
    """Return "'a', 'b' or 'c'" for the values a, b and c."""
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}"


def counted(number: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks" for the noun "rank"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(value: object) -> str:
    """Return ``repr(value)``, cut to LONGEST_REPR characters; a placeholder if ``repr`` raises."""
    try:
        text = repr(value)
    except Exception:
        kind = type(value).__name__
        return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind} that cannot be shown"
    return printable(text if len(text) <= LONGEST_REPR else f"{text[:LONGEST_REPR]}…")


def name_of(function: Any) -> str:
    """Return the name of a function, of the function of a ``functools.partial``, or of the class of
    an object that can be called. An attribute ``__name__`` of the object takes precedence.
    """
    if isinstance(function, partial) and not hasattr(function, "__name__"):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def type_of(error: BaseException) -> str:
    """Return the name of an exception's type, or TOO_MANY_FILES if it or one of its causes is a
    lack of open files.
    """
    links = list[BaseException]()
    link: BaseException | None = error
    while link is not None and link not in links:  # an exception may be its own cause
        if isinstance(link, OSError) and link.errno in (errno.EMFILE, errno.ENFILE):
            return TOO_MANY_FILES
        links.append(link)
        link = link.__cause__ or link.__context__
    return type(error).__name__


def is_temporary(status: int) -> bool:
    """Whether a request with an HTTP answer of this status may succeed if it is made again."""
    return status >= 500 or status in (408, 425, 429)


def error_text(error: BaseException) -> str:
    """Return type and text of an exception, even if its ``str()`` raises; with the limit, if it is
    a lack of open files.
    """
    text = printable("".join(traceback.format_exception_only(error)).strip())
    if type_of(error) == TOO_MANY_FILES:
        limit, most = open_file_limits()
        text += f" (this process may open {limit:,} files, at most {most:,}: see ulimit -Hn)"
    return text


def open_file_limits() -> tuple[int, int]:
    """Return the number of files that this process may open, and up to which number it can raise
    this limit. Both are at most MOST_FILES, also for "unlimited".
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, most = (MOST_FILES if bound < 0 else min(bound, MOST_FILES) for bound in limits)
    return limit, most


def trace_of(error: BaseException) -> str:
    """Return the traceback of an exception of the user's code."""
    return printable("".join(traceback.format_exception(error)).rstrip())


def printable(text: object) -> str:
    """Return a text of users for terminals and files, without what a terminal would obey or refuse:
    control characters except for line breaks and tabs, and halves of surrogate pairs, are escaped.
    """
    return str(text).translate(CONTROLS).encode(errors="backslashreplace").decode()


class RunError(RuntimeError):
    """Failure of a run after it started. The message names actor, rank and call."""

    exit_code = EXIT_FAILED


class InfrastructureError(RunError):
    """Failure that is not the policy's, for tools and environments to raise: a server that is lost,
    a quota that is used up. It costs the group of the episode, and no reward is trained.
    """


class UserCodeFailed(RunError):
    """Exception of the user's code. The message names the code and the line."""


class GradientNotFinite(RunError):
    """Gradient that was not finite in more optimizer steps in a row than the config allows."""


class NothingLearned(RunError):
    """End of a run in which no step changed the weights."""


class StorageFull(RunError):
    """Lack of disk space for a file of the run."""


class AlarmRaised(RunError):
    """Alarm of the watchdog for ``condition``, whose action is ``fail``."""

    def __init__(self, message: str, condition: str):
        super().__init__(message)
        self.condition = condition


def is_full(error: BaseException) -> bool:
    """Whether ``error`` is a lack of disk space, or of a quota of it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def naming(code: str) -> Iterator[None]:
    """Turn any exception inside the block into UserCodeFailed, which names ``code`` and the
    line.
    """
    try:
        yield
    except RunError:
        raise
    except BaseException as error:  # SystemExit too
        raise UserCodeFailed(f"{code} raised {error_text(error)}\n{trace_of(error)}") from error


class Interrupted(RunError):
    """End of a run by a signal, or by a call of ``leave``."""

    exit_code = EXIT_INTERRUPTED


class NodeLost(RunError):
    """Loss of a node. The run can resume from its newest checkpoint on other nodes."""

    exit_code = EXIT_AGAIN


class FolderInUse(RunError):
    """Run folder with a living owner. The run can start when that process has ended."""

    exit_code = EXIT_AGAIN


class ActorFailure(RunError):
    """Death, silence or exception of a rank of a mesh. The message names the call."""

    def __init__(
        self,
        message: str,
        *,
        actor: str,
        rank: int,
        call: str,
        kind: Literal["died", "silent", "raised"],
    ):
        super().__init__(message)
        self.actor = actor
        self.rank = rank
        self.call = call
        self.kind = kind

    @property
    def log(self) -> str:
        """Name of the rank's log in ``logs/``."""
        return f"{self.actor}-{self.rank}.log"

    def facts(self) -> dict[str, str | int]:
        """Return which actor failed, on which rank and in which call."""
        return {"actor": self.actor, "rank": self.rank, "call": self.call}


class RankLost(ActorFailure):
    """Death or silence of a rank. Its mesh has to be started again.

    :class:`rl.session.pool.Recovery` decides which losses a session survives:

    - a model: :meth:`rl.session.session.Session.recover` goes back to the newest checkpoint;
    - a generator: :class:`rl.session.pool.GeneratorPool` starts it again, and the router asks
      another one.

    A reward worker is started again by :class:`rl.actors.reward_workers.RewardWorkers`.
    """


class GroupLost(RunError):
    """Loss of the rollouts of one prompt. The run can go on without them."""

    def __init__(self, reason: str, message: str, kind: str = ""):
        super().__init__(message)
        self.reason = reason
        """Short text by which losses are counted, such as "reward raised"."""
        self.kind = kind
        """Name of the exception's type, which distinguishes losses with the same reason."""
        self.rollouts: Sequence[Any] = ()
        """Rollouts without rewards, if the prompt's completions were sampled but not scored."""

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return GroupLost, (self.reason, str(self), self.kind)  # pickled in a process that scores


class WorkerLost(GroupLost):
    """Loss of the process that ran an episode. Another process can run the episode again."""

    def __init__(self, reason: str, message: str, *, in_call: bool):
        super().__init__(reason, message)
        self.in_call = in_call
        """Whether the process was lost during a call of this episode, which may be the cause."""
