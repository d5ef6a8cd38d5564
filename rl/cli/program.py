"""Start of every program of Tiller, before its first slow import."""

import codecs
import contextlib
import functools
import gc
import os
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigError,
    RunError,
    end_program,
    printable,
    trace_of,
)
from rl.host.process import COLLECT_AT, steady

_PLAIN = dict(zip("▁▂▃▄▅▆▇█━─│·•→…", [*"_.,-=+*#--|-*", "->", "..."], strict=True))


def is_starting() -> bool:
    """Whether ``python -m rl.NAME`` is importing this package."""
    return sys.argv[:1] == ["-m"] and any(
        argument.removeprefix("-m").startswith("rl.") for argument in sys.orig_argv[1:]
    )


def begin() -> None:
    """Make Ctrl-C end the program even during an import, make failed output harmless, and collect
    garbage less often.
    """
    gc.set_threshold(*COLLECT_AT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks compute, and have variables of their own
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # a handler, because an import could catch a KeyboardInterrupt
        signal.signal(signal.SIGINT, _interrupt)
    codecs.register_error("plain", _plain)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is closed, so the next opened file would get its number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = steady(sys.stdout, 1)
    sys.stderr = steady(sys.stderr, 2)
    try:
        os.getcwd()
    except FileNotFoundError:
        end_program(_report("the current folder was deleted; change to another", EXIT_CONFIG))


def exit_code(program: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Call ``program`` and return the exit code; print the error that ends it, if any.

    - 0 or what ``program`` returns: done
    - 1: failed
    - 2: the arguments, the config or its input cannot work
    - 75: to be started again
    - 128 + n: ended by signal n; after Ctrl-C outside a session, ``interrupted`` is printed
    """
    try:
        return program() or 0
    except ConfigError as error:
        return _report(str(error), EXIT_CONFIG)
    except RunError as error:
        return _report(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _report(interrupted, EXIT_INTERRUPTED)
    except Exception as error:
        return _report(trace_of(error), EXIT_FAILED)


def as_program(
    work: Callable[[list[str]], int | None], *, interrupted: str = "interrupted"
) -> Callable[..., int]:
    """Return the ``main`` of a program: a function that calls ``work`` with the given arguments, by
    default those of the command line, and returns an :func:`exit_code`.
    """

    @functools.wraps(work)
    def main(arguments: Sequence[str] | None = None) -> int:
        words = list(sys.argv[1:] if arguments is None else arguments)
        return exit_code(lambda: work(words), interrupted=interrupted)

    return main


def reader_of_a_run(
    program: str, description: str, epilog: str, *, takes_run: bool = True, **options: Any
) -> ArgumentParser:
    """Return the parser of a program that reads a run: ``--json``, and RUN if ``takes_run``.
    ``options`` are those of ArgumentParser.
    """
    parser = ArgumentParser(
        prog=program,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=RawDescriptionHelpFormatter,
        **options,
    )
    if takes_run:
        parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    return parser


def _report(error: str, code: int) -> int:
    print(f"error: {printable(error)}", file=sys.stderr)
    return code


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = (
        _PLAIN.get(character, "*" if "\u2800" <= character <= "\u28ff" else "?")
        for character in error.object[error.start : error.end]
    )
    return "".join(plain), error.end


def _interrupt(number: int, frame: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"\ninterrupted before anything was started\n")
    end_program(EXIT_INTERRUPTED)
