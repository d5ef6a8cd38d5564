"""Noise of start weights, with which coarse casts of the weights follow small updates."""

import hashlib

import torch

from rl.model.digest import bits_of, mix, position_weights
from rl.model.shards import Box

_LOW = 0xFFFF  # bits that bfloat16 lacks
_HALF = 0x7FFF  # the largest number of them that bfloat16 rounds down


def dithered(values: torch.Tensor, box: Box, name: str) -> torch.Tensor:
    """Return float32 weights whose casts to bfloat16 are ``values``, moved by random parts of up to
    half a step of bfloat16.

    ``box`` is the place of ``values`` in the tensor ``name``. The noise depends on place and name
    alone, and so on no layout. Zeros, and weights that bfloat16 rounds, stay as they are.
    """
    bits = bits_of(values.float().contiguous())
    rows, columns, _ = position_weights(box, values.device)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    numbers = mix(rows[:, None] * columns + key) >> 32
    noise = numbers.remainder(2 * _HALF + 1).sub(_HALF).to(torch.int32).view_as(bits)
    is_moved = (values != 0) & (bits & _LOW == 0)
    return (bits + noise * is_moved).view(torch.float32)
