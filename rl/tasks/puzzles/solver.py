"""Runs a solution and carries out the operations of the judge. Runs in the sandbox, alone.

The solution is the file ``solution``; the pipes of the judge are in the file ``pipes``.
"""

import builtins
import io
import operator
import sys

from plain import BINARY, OPERATORS, Lines, decode, encode

MOST_PRINTED = 1 << 16  # characters of one operation


def leave(manager, name="", text=""):
    kind = getattr(builtins, name, RuntimeError) if name else None
    return manager.__exit__(kind, kind and kind(text), None)


OPERATIONS: dict = {
    "get": getattr,
    "set": setattr,
    "call": lambda function, arguments, options: function(*arguments, **options),
    "enter": lambda manager: manager.__enter__(),
    "exit": leave,
    **{name: getattr(builtins, name) for name in ("bool", "len", "iter", "next", "str", "repr")},
    **{name: getattr(builtins, name) for name in ("hash", "reversed", "format", "dir")},
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, value: issubclass(value, kind),
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "contains")},
    **{name: getattr(operator, name) for name in OPERATORS},
    **{f"r{name}": lambda one, other, name=name: OPERATIONS[name](other, one) for name in BINARY},
}


def main() -> None:
    sys.set_int_max_str_digits(0)
    with open("pipes") as file:
        lines = Lines(*map(int, file.read().split()))
    with open("solution", encoding="utf-8") as file:
        text = file.read()
    names = {"__name__": "solution"}
    problem = ""
    try:
        exec(compile(text, "solution", "exec"), names)
    except BaseException as error:  # names that were defined before may still do
        problem = f": {type(error).__name__}: {error}"
    objects: list = []
    numbers: dict = {}

    def number_of(value):
        if id(value) not in numbers:  # it lives on in ``objects``
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    def answer(name, target, arguments):
        if name == "name":
            if target not in names:
                raise NameError(f"the solution defines no {target}{problem}")
            return names[target]
        return OPERATIONS[name](objects[target], *arguments)

    while True:
        name, target, arguments = lines.receive()
        sys.stdout = printed = io.StringIO()
        try:
            given = decode(arguments, objects.__getitem__)
            reply = ["value", encode(answer(name, target, given), number_of)]
        except BaseException as error:  # SystemExit too
            reply = ["error", [type(error).__name__, str(error)[:1000]]]
        lines.write(lines.encode([*reply, printed.getvalue()[:MOST_PRINTED]]))


if __name__ == "__main__":
    main()
