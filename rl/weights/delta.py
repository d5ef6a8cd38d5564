"""Difference of a buffer from its previous version, bit for bit.

The code is a table of int32, the number of changed elements of each block, followed for each block
by their indices in the block, uint16, and their new bits.
"""

import torch

from rl.model.digest import bits_of

BLOCK = 1 << 16  # elements: as many as uint16 can index


def encode(new: torch.Tensor, old: torch.Tensor, out: torch.Tensor) -> int:
    """Write the code that turns ``old`` into ``new``, both [N] of one dtype, into ``out``, uint8
    [capacity].

    Returns the number of bytes written; 0 if the capacity is too small. Bits are compared: NaN
    equals itself, and -0.0 differs from 0.0.
    """
    new, old = map(bits_of, (new, old))
    counts = torch.zeros(-(-len(new) // BLOCK), dtype=torch.int32)
    end = counts.nbytes
    if end > len(out):
        return 0
    for block, (after, before) in enumerate(zip(new.split(BLOCK), old.split(BLOCK), strict=True)):
        places = (after != before).nonzero().squeeze(1)
        counts[block] = len(places)
        for field in (places.to(torch.uint16), after[places]):
            field = field.view(torch.uint8)
            if end + len(field) > len(out):
                return 0
            out[end : end + len(field)] = field
            end += len(field)
    out[: counts.nbytes] = counts.view(torch.uint8)
    return end


def apply(code: torch.Tensor, base: torch.Tensor) -> None:
    """Turn ``base`` [N], which is the ``old`` of ``encode``, into its ``new``, in place.

    ``code`` is uint8 [bytes].
    """
    bits = bits_of(base)
    blocks = bits.split(BLOCK)
    end = 4 * len(blocks)
    for block, count in zip(
        blocks, _field(code, 0, len(blocks), torch.int32).tolist(), strict=True
    ):
        places = _field(code, end, count, torch.uint16)
        end += places.nbytes
        values = _field(code, end, count, bits.dtype)
        end += values.nbytes
        block[places.to(torch.int64)] = values


def _field(code: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return code[start : start + count * dtype.itemsize].clone().view(dtype)  # a clone is aligned
