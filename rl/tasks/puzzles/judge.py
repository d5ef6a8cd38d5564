"""Runs tests of a solution that is in another process. Runs in the sandbox, alone.

Standard input is ``[[reader, writer, report], [[names, test], ...]]`` as JSON. For each test, in
order, one byte goes to the file descriptor ``report``: ``1`` if it passed. No code of the solution
runs here: its values arrive as plain data or as a :class:`Remote`. The solution can call the
functions that a test gives to it, and nothing else of the tests.
"""

import ast
import asyncio
import builtins
import inspect
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from plain import (
    BINARY,
    COMPARED,
    MUTABLE,
    OPERATORS,
    PLAIN,
    Lines,
    decode,
    encode,
    plain_type,
    replace,
    share,
)

lines: Lines
in_place = False  # whether a call that returns something may change its arguments
failed: list = []  # assertions in functions that the solution called
compared: list = []  # operators that were to compare an object of the solution with plain data
objects: dict = {}  # of the solution, by number
numbers: dict = {}  # of these, by id
given: list = []  # functions and exceptions of the tests that the solution knows
given_numbers: dict = {}  # of these, by id
shared: dict = {}  # content of attributes as the solution knows it, by number
WRAPPERS = {property: "fget", staticmethod: "__func__", classmethod: "__func__"}
HINT = "an object of the solution was compared with plain data, which it never equals"
UNUSED = ("__module__", "__qualname__", "__classcell__", "__doc__", "__annotations__")


def keep(value, number):
    objects[number] = value
    numbers[id(value)] = number
    return value


class RemoteType(type):
    """Class in the solution's process, or class that a test derives from one."""

    def __new__(meta, name, bases, space):
        if space.get("__module__") != "test":  # of the solution
            return type.__new__(meta, name, bases, space)
        members = []
        for key, value in space.items():
            wrapper = WRAPPERS.get(type(value))
            if key not in UNUSED:
                function = getattr(value, wrapper) if wrapper else value
                members.append([key, type(value).__name__ if wrapper else "", function])
        made = type.__new__(meta, name, bases, space)
        known = [base for base in bases if id(base) in numbers]
        return keep(made, ask("derive", None, name, known, members))

    def __call__(cls, *arguments, **options):
        return ask("call", numbers[id(cls)], arguments, options)

    def __bool__(cls):
        return True

    def __getattr__(cls, name):
        return ask("get", numbers[id(cls)], name)

    def __setattr__(cls, name, value):
        ask("set", numbers[id(cls)], name, value)

    def __instancecheck__(cls, value):
        return id(value) in numbers and ask("isinstance", numbers[id(cls)], value)

    def __subclasscheck__(cls, value):
        return id(value) in numbers and ask("issubclass", numbers[id(cls)], value)


class Remote(metaclass=RemoteType):
    """Object in the solution's process.

    Its operators decide nothing about plain data, so that no solution returns what is equal to
    everything: of operands that are not both in the solution's process, the result must be an
    object of the solution's too.
    """

    __slots__ = ()

    def __getattr__(self, name):
        return ask("get", numbers[id(self)], name)

    def __setattr__(self, name, value):
        if name[:2] == "__":  # as the trace of an exception
            object.__setattr__(self, name, value)
        else:
            ask("set", numbers[id(self)], name, value)

    def __call__(self, *arguments, **options):
        return ask("call", numbers[id(self)], arguments, options)

    def __exit__(self, kind, value, trace):
        return ask("exit", numbers[id(self)], value)

    def __aexit__(self, kind, value, trace):
        return ask("aexit", numbers[id(self)], value)

    def __await__(self):
        return awaited(numbers[id(self)]).__await__()


async def awaited(number):
    """Return the result of a coroutine, or of another awaitable object, of the solution."""
    while not ask("step", number):
        await asyncio.sleep(0)
    return ask("result", number)


def forward(name):
    def operation(self, *arguments):
        return ask(name, numbers[id(self)], *arguments)

    return operation


def forward_operator(name):
    def operation(self, *others):
        theirs = all(id(other) in numbers for other in others)
        if name in COMPARED and not theirs:
            compared.append(name)
            return NotImplemented
        result = ask(name, numbers[id(self)], *others)
        if name in COMPARED or id(result) in numbers or (theirs and others):
            return result
        if others:
            return NotImplemented
        raise TypeError(f"{name} of an object of the solution is not an object of the solution")

    return operation


FORWARDS = {
    f"__{method_name.rstrip('_')}__": make(method_name)
    for make, several in (
        (forward, ("bool", "len", "iter", "next", "getitem", "setitem", "delitem", "contains")),
        (forward, ("str", "repr", "hash", "reversed", "format", "dir", "enter")),
        (forward, ("aiter", "anext", "aenter")),
        (forward_operator, (*OPERATORS, *(f"r{name}" for name in BINARY))),
    )
    for method_name in several
}
WRITTEN = {"__str__", "__repr__", "__format__", "__dir__"}
TEXT = property(lambda value: ask("get", numbers[id(value)], "__doc__"))
for name, method in FORWARDS.items():
    type.__setattr__(Remote, name, method)
for name in ("iter", "len", "getitem", "contains"):  # of a class, as an enumeration has them
    setattr(RemoteType, f"__{name}__", forward(name))
type.__setattr__(RemoteType, "__doc__", TEXT)


class Super:
    """Stand-in for ``super()`` in a class that a test derives from one of the solution."""

    def __init__(self, kind, value):
        object.__setattr__(self, "_of", (kind, value))

    def __getattribute__(self, name):
        kind, value = object.__getattribute__(self, "_of")
        order = type(value).__mro__
        for ancestor in order[order.index(kind) + 1 :]:
            if isinstance(ancestor, RemoteType) and vars(ancestor).get("__module__") != "test":
                return ask("super", numbers[id(ancestor)], value, name)
            if name in vars(ancestor):
                return vars(ancestor)[name].__get__(value, type(value))
        raise AttributeError(f"'super' object has no attribute {name!r}")


def make_super(*arguments):
    if not arguments:
        frame = sys._getframe(1)
        arguments = (frame.f_locals["__class__"], frame.f_locals[frame.f_code.co_varnames[0]])
    return (Super if isinstance(arguments[0], RemoteType) else super)(*arguments)


def refer(value):
    """Return the reference of what a test gives to the solution."""
    if id(value) in numbers:
        return ["object", numbers[id(value)]]
    if id(value) in given_numbers:
        return ["given", given_numbers[id(value)]]
    name = str(getattr(value, "__name__", ""))
    if getattr(builtins, name, None) is value:
        return ["builtin", name]
    if kind := plain_type(type(value)):
        return encode(value, refer, kind)
    if isinstance(value, type) and issubclass(value, BaseException):
        bases = [base for base in value.__mro__[1:] if base.__module__ == "builtins"]
        keep(value, ask("derive", None, name, bases[:1], []))
        return refer(value)
    if hasattr(type(value), "__next__"):
        return ["iterator", refer(value.__next__)]
    if not isinstance(value, BaseException) and not callable(value):
        raise TypeError(
            f"a {type(value).__name__} cannot be given to a solution; give plain data, a function "
            "or an object of the solution"
        )
    given_numbers[id(value)] = len(given)
    given.append(value)
    if callable(value):
        name = name or type(value).__name__
        is_async = inspect.iscoroutinefunction(value)
        return ["function", len(given) - 1, name, value.__doc__, is_async]
    content = [encode(type(value), refer), encode(list(value.args), refer)]
    return ["raised", len(given) - 1, *content]


def find(kind, number, *content):
    """Return what a reference of the solution names."""
    if kind == "given":
        return given[number]
    if kind == "builtin":
        builtin = getattr(builtins, number)
        if builtin in PLAIN or issubclass(builtin, Exception):
            return builtin
        return RuntimeError if issubclass(builtin, BaseException) else Remote
    if kind == "coroutine" and number not in objects:
        keep(awaited(number), number)
    if kind == "class" and number not in objects:
        name, bases = content
        keep(make_class(name, [decode(base, find) for base in bases]), number)
    if kind in ("class", "coroutine"):
        return objects[number]
    return make_object(number, *(decode(item, find) for item in content))


def make_class(name, bases):
    """Return a class that stands for one of the solution. Operators of plain data are those of the
    built-in type.
    """
    known = [base for base in bases if type(base) is RemoteType and base is not Remote]
    others = [base for base in bases if type(base) is not RemoteType]
    kind = next(filter(None, map(plain_type, bases)), None)
    inherited = {key for key in FORWARDS if hasattr(kind, key)} - WRITTEN if kind else ()
    space = {"__module__": "solution", "__slots__": (), "__doc__": TEXT}
    space.update((key, getattr(kind, key)) for key in inherited)
    return RemoteType(name, (*known, Remote, *others), space)


def make_object(number, kind, content):
    """Return what stands for an object, with its plain data or arguments of an exception."""
    if number in objects and content is None:
        return objects[number]
    builtin = next(ancestor for ancestor in kind.__mro__ if ancestor.__module__ == "builtins")
    base = plain_type(kind) or builtin
    if issubclass(kind, BaseException):
        if number not in objects:
            keep(base.__new__(kind, *content), number)
    elif content is None:
        keep(object.__new__(kind), number)
    elif base in MUTABLE:
        if number not in objects:
            keep(base.__new__(kind), number)
        replace(objects[number], content)
        share(shared, number, content_of(number), len(content))
    elif number not in objects:
        keep(base.__new__(kind, content), number)
    return objects[number]


def content_of(number):
    return encode(objects[number], refer, plain_type(type(objects[number])))


def ask(operation, target, *arguments):
    """Return the result of an operation in the solution's process, or raise its exception."""
    now = {number: content_of(number) for number in shared}
    changed = [pair for pair in now.items() if pair[1] != shared[pair[0]]]
    shared.update(now)
    message = [operation, target, encode(list(arguments), refer), changed]
    lines.write(lines.encode(message))
    while (reply := lines.receive())[0] == "call":
        lines.write(lines.encode(called(*reply[1:])))
    kind, content, printed, changed, after = reply
    if sys.stdout is not sys.__stdout__:  # the test looks at what is printed
        print(printed, end="")
    for number, new in changed:
        replace(objects[number], decode(new, find))
        shared[number] = content_of(number)
    value = decode(content, find)
    if kind == "error":
        ends = isinstance(value, (StopIteration, StopAsyncIteration))
        if ends and operation not in ("next", "result"):  # which would end a loop of the test's
            raise RuntimeError(f"{type(value).__name__}: {value}")
        raise value
    if after and (value is None or in_place):
        values, options = arguments
        for old, new in zip([*values, *options.values()], decode(after, find), strict=True):
            if type(old) in MUTABLE and type(old) is type(new):
                replace(old, new)
    return value


def called(number, arguments):
    """Return the result of a function of the test that the solution calls."""
    try:
        arguments, options = decode(arguments, find)
        value = given[number](*arguments, **options)
        if inspect.iscoroutine(value) and id(value) not in numbers:
            with ThreadPoolExecutor(1) as thread:  # this one may run a loop
                value = thread.submit(asyncio.run, value).result()
        return ["value", encode(value, refer)]
    except AssertionError as error:
        failed.append(error)
        return ["error", refer(error)]
    except BaseException as error:
        return ["error", refer(error)]


def main() -> None:
    global lines, in_place
    sys.set_int_max_str_digits(0)
    (reader, writer, report), tests = json.load(sys.stdin)
    lines = Lines(reader, writer)
    for names, test, *options in tests:
        in_place = bool(options)
        failed.clear()
        compared.clear()
        passed = b"1"
        try:
            known = {name: ask("name", None, name) for name in names}
            space = {"__name__": "test", "super": make_super, **known}
            code = compile(test, "test", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if main := eval(code, space):
                asyncio.run(main)
            if failed:
                raise failed[0]
        except BaseException as error:
            hint = f"{HINT}; " if compared else ""
            print(f"{type(error).__name__}: {hint}{error}", file=sys.stderr)
            passed = b"0"
        os.write(report, passed)


if __name__ == "__main__":
    main()
