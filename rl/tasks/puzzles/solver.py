"""Runs a solution and carries out the operations of the judge. Runs in the sandbox, alone.

The solution is the file ``solution``; the pipes of the judge are in the file ``pipes``.
"""

import asyncio
import builtins
import inspect
import io
import operator
import sys
import threading
import types

from plain import BINARY, MUTABLE, OPERATORS, Lines, decode, encode, plain_type, replace, share

MOST_PRINTED = 1 << 16  # characters of one operation

lines: Lines
names: dict = {"__name__": "solution"}
problem = ""
objects: list = []  # all that the judge knows, which live on here
numbers: dict = {}  # of these, by id
theirs: dict = {}  # functions and exceptions of the tests, by number
their_numbers: dict = {}
shared: dict = {}  # content of attributes as the judge knows it, by number
calling = threading.RLock()
loop = asyncio.new_event_loop()
tasks: dict = {}  # of coroutines, by id


def keep(value):
    if id(value) not in numbers:
        numbers[id(value)] = len(objects)
        objects.append(value)
    return numbers[id(value)]


def refer(value):
    if id(value) in their_numbers:
        return ["given", their_numbers[id(value)]]
    if isinstance(value, type):
        name = value.__name__
        if vars(builtins).get(name) is value:
            return ["builtin", name]
        return ["class", keep(value), name, [encode(base, refer) for base in value.__bases__]]
    number = keep(value)
    if inspect.iscoroutine(value):
        return ["coroutine", number]
    kind = plain_type(type(value))
    content = encode(value, refer, kind) if kind else None
    if isinstance(value, BaseException):
        content = encode(list(value.args), refer)
    if kind in MUTABLE:
        share(shared, number, content, len(value))
    return ["object", number, encode(type(value), refer), content]


def find(kind, number, *content):
    if kind == "object":
        return objects[number]
    if kind == "builtin":
        return getattr(builtins, number)
    if kind == "iterator":
        return iter(decode(number, find), object())
    if number not in theirs:
        theirs[number] = call_back(number, *content) if kind == "function" else raised(*content)
        their_numbers[id(theirs[number])] = number
    return theirs[number]


def raised(kind, arguments):
    return decode(kind, find)(*decode(arguments, find))


def call_back(number, name, text, is_async):
    def function(*arguments, **options):
        with calling:
            encoded = encode([arguments, options], refer)
            lines.write(lines.encode(["call", number, encoded]))
            while (message := lines.receive())[0] not in ("value", "error"):
                serve(message)
        value = decode(message[1], find)
        if message[0] == "error":
            raise value
        return value

    function.__name__ = function.__qualname__ = name
    function.__doc__ = text

    async def later(*arguments, **options):
        return function(*arguments, **options)

    return later if is_async else function


def defined(_, name):
    if name not in names:
        raise NameError(f"the solution defines no {name}{problem}")
    return names[name]


def call(function, arguments, options):
    return function(*arguments, **options)


def inherited(kind, value, name):
    """Return the attribute of ``super(..., value)`` if ``kind`` is the next class."""
    order = type(value).__mro__
    for ancestor in order[order.index(kind) :]:
        if name in vars(ancestor):
            member = vars(ancestor)[name]
            return member.__get__(value, type(value)) if hasattr(member, "__get__") else member
    raise AttributeError(f"'super' object has no attribute {name!r}")


def derive(_, name, bases, members):
    """Return the number of a class whose functions are those of a test."""
    space = {
        key: getattr(builtins, wrapper)(value) if wrapper else value
        for key, wrapper, value in members
    }
    return keep(types.new_class(name, tuple(bases), {}, lambda known: known.update(space)))


def leave(manager, error, name="__exit__"):
    return getattr(manager, name)(error and type(error), error, error and error.__traceback__)


async def whole(awaitable):
    return await awaitable


def step(awaitable):
    """Let coroutines go on for a moment. Return whether this one has ended."""
    if id(awaitable) not in tasks:
        tasks[id(awaitable)] = loop.create_task(whole(awaitable))
    task = tasks[id(awaitable)]
    loop.run_until_complete(asyncio.wait([task], timeout=0.001))
    return task.done()


OPERATIONS: dict = {
    "name": defined,
    "get": getattr,
    "set": setattr,
    "call": call,
    "super": inherited,
    "derive": derive,
    "enter": lambda manager: manager.__enter__(),
    "exit": leave,
    "aenter": lambda manager: manager.__aenter__(),
    "aexit": lambda manager, error: leave(manager, error, "__aexit__"),
    "step": step,
    "result": lambda awaitable: tasks[id(awaitable)].result(),
    **{name: getattr(builtins, name) for name in ("bool", "len", "iter", "next", "str", "repr")},
    **{name: getattr(builtins, name) for name in ("hash", "reversed", "format", "dir")},
    **{name: getattr(builtins, name) for name in ("aiter", "anext")},
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, value: issubclass(value, kind),
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "contains")},
    **{name: getattr(operator, name) for name in OPERATORS},
    **{f"r{name}": lambda one, other, name=name: OPERATIONS[name](other, one) for name in BINARY},
}


def content_of(number):
    return encode(objects[number], refer, plain_type(type(objects[number])))


def serve(message):
    """Carry out an operation and write its result, and what the judge must know to be changed."""
    name, target, encoded, changed = message
    stdout = sys.stdout
    sys.stdout = printed = io.StringIO()
    before = after = None
    try:
        for number, content in changed:
            replace(objects[number], decode(content, find))
            shared[number] = content_of(number)
        arguments = decode(encoded, find)
        several = [*arguments[0], *arguments[1].values()] if name == "call" else []
        before = encode(several, refer)
        value = OPERATIONS[name](None if target is None else objects[target], *arguments)
        is_mutable = name == "get" and type(value) in MUTABLE  # which keeps a reference to it
        reply = ["value", refer(value) if is_mutable else encode(value, refer)]
        after = encode(several, refer)
    except BaseException as error:  # SystemExit too
        reply = ["error", refer(error)]
    finally:
        sys.stdout = stdout
    now = {number: content_of(number) for number in shared}
    changed = [pair for pair in now.items() if pair[1] != shared[pair[0]]]
    shared.update(now)
    after = after if after != before else None
    lines.write(lines.encode([*reply, printed.getvalue()[:MOST_PRINTED], changed, after]))


def main() -> None:
    global lines, problem
    sys.set_int_max_str_digits(0)
    with open("pipes") as file:
        lines = Lines(*map(int, file.read().split()))
    with open("solution", encoding="utf-8") as file:
        text = file.read()
    try:
        exec(compile(text, "solution", "exec"), names)
    except BaseException as error:  # names that were defined before may still do
        problem = f": {type(error).__name__}: {error}"
    while True:
        serve(lines.receive())


if __name__ == "__main__":
    main()
