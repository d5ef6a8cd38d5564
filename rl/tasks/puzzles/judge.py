"""Runs tests of a solution that is in another process. Runs in the sandbox, alone.

Standard input is ``[[reader, writer, report], [[names, test], ...]]`` as JSON. For each test, in
order, one byte goes to the file descriptor ``report``: ``1`` if it passed. No code of the solution
runs here: its values arrive as plain data or as a :class:`Remote`.
"""

import builtins
import functools
import json
import os
import sys

from plain import BINARY, COMPARED, OPERATORS, Lines, decode, encode

lines: Lines


class Remote:
    """Object in the solution's process.

    Its operators decide nothing about plain data, so that no solution returns what is equal to
    everything: of operands that are not both in the solution's process, the result must be an
    object of the solution's too.
    """

    __slots__ = ("_number",)

    def __init__(self, number):
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name):
        return ask("get", self._number, name)

    def __setattr__(self, name, value):
        ask("set", self._number, name, value)

    def __call__(self, *arguments, **options):
        return ask("call", self._number, arguments, options)

    def __instancecheck__(self, value):
        return isinstance(value, Remote) and ask("isinstance", self._number, value)

    def __subclasscheck__(self, value):
        return isinstance(value, Remote) and ask("issubclass", self._number, value)

    def __mro_entries__(self, bases):
        raise TypeError("a test cannot derive a class from a class of the solution")

    def __exit__(self, kind, value, trace):
        return ask("exit", self._number, *([] if kind is None else [kind.__name__, str(value)]))


remote = functools.cache(Remote)  # one object is one object


def forward(name):
    def operation(self, *arguments):
        return ask(name, self._number, *arguments)

    return operation


def forward_operator(name):
    def operation(self, *others):
        if name in COMPARED and not isinstance(others[0], Remote):
            return NotImplemented
        result = ask(name, self._number, *others)
        if name in COMPARED or isinstance(result, Remote):
            return result
        if all(isinstance(other, Remote) for other in others) and others:
            return result
        return NotImplemented if others else unusable(name)

    return operation


def unusable(name):
    raise TypeError(f"{name} of an object of the solution is no object of the solution")


for each in ("bool", "len", "iter", "next", "getitem", "setitem", "delitem", "contains"):
    setattr(Remote, f"__{each}__", forward(each))
for each in ("str", "repr", "hash", "reversed", "format", "dir", "enter"):
    setattr(Remote, f"__{each}__", forward(each))
for each in (*OPERATORS, *(f"r{name}" for name in BINARY)):
    setattr(Remote, f"__{each.rstrip('_')}__", forward_operator(each))


def ask(operation, target, *arguments):
    """Return the result of an operation in the solution's process, or raise its exception."""
    lines.write(lines.encode([operation, target, encode(list(arguments), number_of)]))
    kind, content, printed = lines.receive()
    if sys.stdout is not sys.__stdout__:  # the test looks at what is printed
        print(printed, end="")
    if kind == "value":
        return decode(content, remote)
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
