"""Plain data as lines of JSON between a solution and its tests. Runs in the sandbox, alone.

Numbers, text, bytes, None, lists, tuples, sets, dicts, deques, ranges, dates and the numbers of
``decimal`` and ``fractions`` go by value. Any other object stays in its process, and a reference to
it goes.
"""

import importlib
import json
import os
from collections import deque

MOST_BYTES = 1 << 20  # of one line
MOST_SHARED, MOST_ITEMS = 8, 1000  # of lists that both programs may change
SCALARS = (bool, int, float, str)
MUTABLE = (list, dict, set, deque)
MANY: dict = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
PLAIN = (*SCALARS, complex, bytes, bytearray, dict, *MANY.values())
LIBRARY = {
    **{"range": "builtins", "Counter": "collections", "Decimal": "decimal"},
    **{"Fraction": "fractions"},
    **dict.fromkeys(("date", "datetime", "time", "timedelta", "timezone"), "datetime"),
}
BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("lshift", "rshift", "and_", "or_", "xor"),
)
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
OPERATORS = (*BINARY, *COMPARED, "neg", "pos", "abs", "invert")
"""Operators of the module ``operator`` that objects of a solution may have."""


def plain_type(kind):
    """Return the type of plain data that ``kind`` is or derives from, or None."""
    return next((ancestor for ancestor in kind.__mro__ if ancestor in PLAIN), None)


def encode(value, refer, kind=None):
    """Return ``value`` in a form that JSON can hold: as one of type ``kind`` if that is given.

    Any other object becomes ``refer(object)``, a list that begins with a text.
    """
    kind = kind or type(value)
    if value is None or kind in SCALARS:
        return value
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (bytes, bytearray):
        return ["bytes", value.hex()]
    if kind is dict:
        return ["dict", [[encode(key, refer), encode(item, refer)] for key, item in value.items()]]
    name = kind.__name__
    if MANY.get(name) is kind:
        return [name, [encode(item, refer) for item in value]]
    if LIBRARY.get(name) == kind.__module__:
        return ["library", name, [encode(item, refer) for item in value.__reduce__()[1]]]
    return refer(value)


def decode(value, find):
    """Return the value that :func:`encode` wrote; ``find(*reference)`` returns an object."""
    if value is None or isinstance(value, SCALARS):
        return value
    kind, *content = value
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(*content)
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in content[0]}
    if kind == "library":
        made = getattr(importlib.import_module(LIBRARY[content[0]]), content[0])
        return made(*(decode(item, find) for item in content[1]))
    if kind in MANY:
        return MANY[kind](decode(item, find) for item in content[0])
    return find(*value)


def replace(value, content):
    """Give a list, set, dict or deque this content, if it has another."""
    if value != content:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(content)


def share(shared, number, content, length):
    """Note the content of a list that both programs may change, unless it is long."""
    if length < MOST_ITEMS:
        shared[number] = content
    while len(shared) > MOST_SHARED:
        del shared[next(iter(shared))]


class Lines:
    """Lines of JSON to and from the other program. Raises OSError if that has ended."""

    def __init__(self, reader: int, writer: int):
        self.reader = os.fdopen(reader, "rb")
        self.writer = os.fdopen(writer, "wb", buffering=0)

    def encode(self, message) -> bytes:
        return json.dumps(message).encode() + b"\n"

    def write(self, line: bytes) -> None:
        while line:
            line = line[self.writer.write(line) :]

    def receive(self):
        line = self.reader.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise BrokenPipeError("the other program has ended, or its answer is too long")
        return json.loads(line)
