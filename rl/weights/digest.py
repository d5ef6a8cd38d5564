"""Checksums of parameters that do not depend on how they are cut."""

import hashlib
import json
from collections.abc import Iterable

import torch

from rl.model.parts import Box, Part

_CHUNK = 1 << 18  # elements at once: the int64 positions and products of a few megabytes stay in the cache
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

PartDigests = dict[tuple[str, Box], int]
"""What one rank says of its parts, by name and box."""


def digests(parts: Iterable[Part], *, dtype: torch.dtype | None = None) -> PartDigests:
    """Digests of one rank's parts, cast to ``dtype`` first if given."""
    return {
        (part.name, part.box): part_digest(part._replace(tensor=part.tensor.to(dtype)) if dtype else part)
        for part in parts
    }


@torch.no_grad()
def part_digest(part: Part) -> int:
    """An int64: a sum over the part's elements of mixed (bits, position in the whole).

    The digest of a tensor is the sum, modulo 2^64, of those of any parts that tile it.
    """
    bits = bits_of(part.tensor.detach().contiguous()).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        values = bits[start : start + _CHUNK]
        index = torch.arange(start, start + len(values), device=bits.device)
        total += (_mix(_position(index, part)) * (values.to(torch.int64) + 0x9E3779B9)).sum()
    return int(total)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits, as integers of their size."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _position(index: torch.Tensor, part: Part) -> torch.Tensor:
    """Where in the whole parameter, flattened, the part's flattened elements ``index`` lie."""
    position, stride = torch.zeros_like(index), 1
    for offset, size, whole in zip(*map(reversed, (*part.box, part.shape)), strict=True):
        position += (index % size + offset) * stride
        index = index // size
        stride *= whole
    return position


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Odd, well-spread multipliers from positions (the finalizer of splitmix64, with signed shifts)."""
    x = (x + 1) * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) | 1


def merge_digests(ranks: Iterable[PartDigests]) -> dict[str, str]:
    """Digest of each whole parameter from all ranks' parts, as 16 hex digits.

    Raises ValueError, naming the parameter, where two ranks hold the same part with different values.
    """
    parts: dict[tuple[str, Box], int] = {}
    for rank in ranks:
        for (name, box), digest in rank.items():
            if parts.setdefault((name, box), digest) != digest:
                raise ValueError(f"parameter {name}: two ranks hold different values of the same part {box}")
    totals: dict[str, int] = {}
    for (name, _), digest in parts.items():
        totals[name] = totals.get(name, 0) + digest
    return {name: f"{total % (1 << 64):016x}" for name, total in totals.items()}


def policy_digest(digests: dict[str, str]) -> str:
    """One hash, 64 hex digits, of all parameters."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
