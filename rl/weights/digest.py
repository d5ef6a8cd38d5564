"""Checksums of parameters that do not depend on how they are cut."""

import hashlib
import json
from collections.abc import Iterable

import torch

from rl.model.parts import Box, Part, Parts

_CHUNK = 1 << 20
_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

PartDigests = dict[str, tuple[Box, int]]
"""What one rank says of its parts: {name: (box, digest)}."""


def digests(parts: Parts, *, dtype: torch.dtype | None = None) -> PartDigests:
    """Digests of one rank's parts, cast to ``dtype`` first if given."""
    return {
        name: (part.box, part_digest(part._replace(tensor=part.tensor.to(dtype)) if dtype else part))
        for name, part in parts.items()
    }


@torch.no_grad()
def part_digest(part: Part) -> int:
    """An int64: a sum over the part's elements of mixed (bits, position in the whole).

    The digest of a tensor is the sum, modulo 2^64, of those of any parts that tile it.
    """
    tensor, shape, box = part
    bits = tensor.detach().contiguous().view(_WIDTH[tensor.element_size()]).reshape(-1)
    position = torch.zeros(box.shape, dtype=torch.int64, device=tensor.device)
    stride = 1
    for dim in reversed(range(len(shape))):
        index = torch.arange(box.offset[dim], box.offset[dim] + box.shape[dim], device=tensor.device)
        position += (index * stride).view([-1 if d == dim else 1 for d in range(len(shape))])
        stride *= shape[dim]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for values, places in zip(bits.split(_CHUNK), position.reshape(-1).split(_CHUNK), strict=True):
        total += (_mix(places) * (values.to(torch.int64) + 0x9E3779B9)).sum()
    return int(total)


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
    parts: dict[str, dict[Box, int]] = {}
    for rank in ranks:
        for name, (box, digest) in rank.items():
            if parts.setdefault(name, {}).setdefault(box, digest) != digest:
                raise ValueError(f"parameter {name}: two ranks hold different values of the same part {box}")
    return {name: f"{sum(boxes.values()) % (1 << 64):016x}" for name, boxes in parts.items()}


def policy_digest(digests: dict[str, str]) -> str:
    """One hash, 64 hex digits, of all parameters."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
