"""Plain data as lines of JSON between a solution and its tests. Runs in the sandbox, alone.

Numbers, text, bytes, None, lists, tuples, sets and dicts go by value. Values of subclasses of these
become values of the built-in type. Any other object stays in its process, and its number goes.
"""

import json
import os

MOST_BYTES = 1 << 20  # of one line
SCALARS: tuple = (bool, int, float, str)
BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("lshift", "rshift", "and_", "or_", "xor"),
)
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
OPERATORS = (*BINARY, *COMPARED, "neg", "pos", "abs", "invert")
"""Operators of the module ``operator`` that objects of a solution may have."""
MANY: dict = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value, number_of):
    """Return ``value`` in a form that JSON can hold.

    Any other object becomes ``["object", number_of(object)]``.
    """
    if value is None or value is True or value is False:
        return value
    for kind in SCALARS:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        pairs = [[encode(key, number_of), encode(item, number_of)] for key, item in value.items()]
        return ["dict", pairs]
    for name, kind in MANY.items():
        if isinstance(value, kind):
            return [name, [encode(item, number_of) for item in value]]
    return ["object", number_of(value)]


def decode(value, object_of):
    """Return the value that :func:`encode` wrote; ``object_of(number)`` returns an object."""
    if value is None or isinstance(value, SCALARS):
        return value
    kind, content = value[0], value[1]
    if kind == "complex":
        return complex(content, value[2])
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key, object_of): decode(item, object_of) for key, item in content}
    if kind == "object":
        return object_of(content)
    return MANY[kind](decode(item, object_of) for item in content)


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
