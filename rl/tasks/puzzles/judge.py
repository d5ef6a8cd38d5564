"""Runs tests of a solution that is in another process. Runs in the sandbox, alone.

Standard input is ``[[reader, writer, report], [[names, test], ...]]`` as JSON. For each test, in
order, one byte goes to the file descriptor ``report``: ``1`` if it passed. No code of the solution
runs here: its values arrive as plain data or as a :class:`Remote`.
"""

import builtins
import json
import os
import sys

from plain import Lines, decode, encode

lines: Lines


class Remote:
    """Object in the solution's process. It is equal to itself only, whatever its ``__eq__``."""

    __slots__ = ("_number",)

    def __init__(self, number):
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name):
        return ask("get", self._number, name)

    def __call__(self, *arguments, **options):
        return ask("call", self._number, arguments, options)


def forward(name):
    def operation(self, *arguments):
        return ask(name, self._number, *arguments)

    return operation


for each in ("bool", "len", "iter", "next", "getitem", "contains", "str", "repr"):
    setattr(Remote, f"__{each}__", forward(each))


def ask(operation, target, *arguments):
    """Return the result of an operation in the solution's process, or raise its exception."""
    lines.write(lines.encode([operation, target, encode(list(arguments), number_of)]))
    kind, content = lines.receive()
    if kind == "value":
        return decode(content, Remote)
    name, text = content
    raise exception(name, text, ends=operation == "next")


def exception(name, text, ends):
    """Return the exception to raise in the test for one that the solution raised.

    ``name`` is its type's name and ``text`` its message. Types that are no built-in exceptions
    become RuntimeError. So does StopIteration unless ``ends``, since it would end a loop of the
    test.
    """
    kind = getattr(builtins, name, str)
    allowed = isinstance(kind, type) and issubclass(kind, Exception)
    if allowed and (ends or kind is not StopIteration):  # which would end a loop of the test's
        try:
            return kind(text)
        except TypeError:  # as UnicodeDecodeError, which takes more
            pass
    return RuntimeError(f"{name}: {text}")


def number_of(value):
    if isinstance(value, Remote):
        return value._number
    raise TypeError(f"a {type(value).__name__} cannot be given to a solution; give plain data")


def main() -> None:
    global lines
    sys.set_int_max_str_digits(0)
    (reader, writer, report), tests = json.load(sys.stdin)
    lines = Lines(reader, writer)
    for names, test in tests:
        passed = b"1"
        try:
            known = {name: ask("name", name) for name in names}
            exec(compile(test, "test", "exec"), {"__name__": "test", **known})
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            passed = b"0"
        os.write(report, passed)


if __name__ == "__main__":
    main()
