"""Checksums of parameters that do not depend on their sharding."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from functools import cache

import torch

from rl.model.shards import Box, Shard

_CHUNK = {"cpu": 1 << 16}  # elements at once: their int64 bits stay in the cache
_CHUNK_ON_DEVICE = 1 << 24  # so that kernels take longer than their launch
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ZERO = 0x9E3779B9  # added to all bits, so that zeros count

ShardDigests = dict[tuple[str, Box], int]
"""Digests of one rank's shards, by name and box."""


def digests(shards: Iterable[Shard], *, dtype: torch.dtype | None = None) -> ShardDigests:
    """Return the digests of one rank's shards, cast to ``dtype`` first if given."""
    every = [*shards]
    if not every:
        return {}
    sums = torch.stack([shard_digest(shard, dtype or shard.tensor.dtype) for shard in every])
    # one copy from the device for all
    return {(shard.name, shard.box): n for shard, n in zip(every, sums.tolist(), strict=True)}


@torch.no_grad()
def shard_digest(shard: Shard, dtype: torch.dtype) -> torch.Tensor:
    """Return an int64 scalar: the sum over the shard's elements of their bits times the weight of
    their position in the whole tensor.

    The digest of a tensor is the sum, modulo 2^64, of the digests of any shards that tile it. The
    weight of a position is the product of one odd number for its index in each dimension. The bits
    are the bits of the elements in ``dtype``.
    """
    tensor = shard.tensor.detach()
    rows, columns, zeros = position_weights(shard.box, tensor.device)
    if not tensor.numel():
        return zeros.new_zeros(())
    values = tensor.reshape(len(rows), len(columns))
    sums = torch.empty_like(rows)
    step = max(1, _CHUNK.get(tensor.device.type, _CHUNK_ON_DEVICE) // len(columns))
    for start in range(0, len(rows), step):
        bits = bits_of(values[start : start + step].to(dtype).contiguous())
        # CUDA multiplies no matrices of integers
        on_cpu = bits.device.type == "cpu"
        weighted = torch.mv(bits.long(), columns) if on_cpu else (bits * columns).sum(1)
        sums[start : start + step] = weighted
    return (rows * (sums + zeros)).sum()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits as integers of the same size."""
    return tensor.view(_INTEGERS[tensor.element_size()])


@cache
def position_weights(
    box: Box, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights of the positions in ``box``, of all leading dimensions together and of
    the last dimension, and the sum of a row of zeros. Cached, since layers have equal boxes.
    """
    ranges = zip(box.offset, box.shape, strict=True)
    places = [torch.arange(offset, offset + size, device=device) for offset, size in ranges]
    weights = [mix(place + (dimension << 56)) for dimension, place in enumerate(places)]
    rows = torch.ones(1, dtype=torch.int64, device=device)
    *leading, last = weights or [rows]
    for weight in leading:
        rows = (rows[:, None] * weight).reshape(-1)
    return rows, last, last.sum() * _ZERO


def mix(x: torch.Tensor) -> torch.Tensor:
    """Hash small numbers to odd ones (the finalizer of splitmix64, with signed shifts)."""
    x = (x + 1) * -7046029254386353131
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) | 1


def merge_digests(ranks: Iterable[ShardDigests]) -> dict[str, str]:
    """Return the digest of each whole parameter from all ranks' shards, as 16 hex digits.

    Raises ValueError, naming the parameter, if two ranks hold different values of one shard.
    """
    shards: ShardDigests = {}
    for rank in ranks:
        for (name, box), digest in rank.items():
            if shards.setdefault((name, box), digest) != digest:
                raise ValueError(
                    f"parameter {name}: two ranks hold different values of the same shard {box}"
                )
    totals = Counter[str]()
    for (name, _), digest in shards.items():
        totals[name] += digest
    return {name: f"{total % (1 << 64):016x}" for name, total in totals.items()}


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names of the parameters whose digests differ."""
    names = [*before, *(name for name in after if name not in before)]
    return [name for name in names if before.get(name) != after.get(name)]


def policy_digest(digests: dict[str, str]) -> str:
    """Return one hash, 64 hex digits, of all parameters."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
