"""Runs a solution and carries out the operations of the judge. Runs in the sandbox, alone.

The solution is the file ``solution``; the pipes of the judge are in the file ``pipes``.
"""

import operator
import sys

from plain import Lines, decode, encode

OPERATIONS: dict = {
    "get": getattr,
    "call": lambda function, arguments, options: function(*arguments, **options),
    "bool": bool,
    "len": len,
    "iter": iter,
    "next": next,
    "getitem": operator.getitem,
    "contains": operator.contains,
    "str": str,
    "repr": repr,
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
    objects = []

    def number_of(value):
        objects.append(value)
        return len(objects) - 1

    def answer(name, target, arguments):
        if name == "name":
            if target not in names:
                raise NameError(f"the solution defines no {target}{problem}")
            return names[target]
        return OPERATIONS[name](objects[target], *arguments)

    while True:
        name, target, arguments = lines.receive()
        try:
            given = decode(arguments, objects.__getitem__)
            reply = lines.encode(["value", encode(answer(name, target, given), number_of)])
        except BaseException as error:  # SystemExit too
            reply = lines.encode(["error", [type(error).__name__, str(error)[:1000]]])
        lines.write(reply)


if __name__ == "__main__":
    main()
