"""Sampling masks: the part of the vocabulary that each token was sampled from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F

WORD = 32
"""Bits of a word."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """Sets of ids that T tokens were sampled from: what top-k, top-p and min-p kept.

    ``words`` holds the sets one after another. The entry of ``sizes`` for a token tells the form of
    its set:

    - 0: the whole vocabulary, which takes no words.
    - n > 0: n words, each of them an id.
    - n < 0: a bitmap of -n words. Bit b of word w stands for the id 32 w + b.
    """

    sizes: np.ndarray
    """int32 [T]."""
    words: np.ndarray
    """int32 [sum of the absolute sizes]."""

    @classmethod
    def of_rows(cls, rows: Sequence[np.ndarray]) -> Self:
        """Return the mask of the rows of ``encode``, one for each token."""
        sizes = np.array([row[0] for row in rows], dtype=np.int32)
        return cls(sizes, _joined([row[1:] for row in rows]))

    @classmethod
    def joined(cls, masks: Sequence["SamplingMask"]) -> Self:
        """Return the mask of all tokens of ``masks``, in order."""
        return cls(_joined([mask.sizes for mask in masks]), _joined([mask.words for mask in masks]))

    @classmethod
    def whole(cls, count: int) -> Self:
        """Return the mask of ``count`` tokens that were sampled from the whole vocabulary."""
        return cls(np.zeros(count, dtype=np.int32), np.empty(0, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SamplingMask)
            and np.array_equal(self.sizes, other.sizes)
            and np.array_equal(self.words, other.words)
        )

    __hash__ = None  # type: ignore[assignment]

    def select(self, index: np.ndarray) -> "SamplingMask":
        """Return the mask of the tokens ``index``, int [N], in this order."""
        counts = np.abs(self.sizes).astype(np.int64)
        starts = (counts.cumsum() - counts)[index]
        counts = counts[index]
        shifts = starts - (counts.cumsum() - counts)
        words = np.arange(counts.sum()) + np.repeat(shifts, counts)
        return SamplingMask(self.sizes[index], self.words[words])

    def placed(self, places: np.ndarray, count: int) -> "SamplingMask":
        """Return a mask of ``count`` tokens with the sets of this one at ``places``, int [T], which
        ascend. The other tokens have the whole vocabulary.
        """
        sizes = np.zeros(count, dtype=np.int32)
        sizes[places] = self.sizes
        return SamplingMask(sizes, self.words)

    def ids(self, token: int) -> np.ndarray | None:
        """Return the sorted ids that this token was sampled from, int64; None for all."""
        size = int(self.sizes[token])
        if size == 0:
            return None
        start = int(np.abs(self.sizes[:token]).sum(dtype=np.int64))
        words = self.words[start : start + abs(size)]
        if size > 0:
            return np.sort(words).astype(np.int64)
        return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def encode(allowed: torch.Tensor) -> list[np.ndarray]:
    """Return the sets of ``allowed``, bool [N, V], as int32 rows: a size and its words, as in
    SamplingMask. Each set has the shorter one of its two forms.
    """
    vocab_size = allowed.shape[1]
    width = -(-vocab_size // WORD)
    counts = allowed.sum(1)
    sizes = torch.where(counts > width, -width, counts)
    sizes = torch.where(counts == vocab_size, 0, sizes).int()
    ids = allowed[sizes > 0].nonzero()[:, 1].int().cpu().numpy()
    bits = F.pad(allowed[sizes < 0], (0, width * WORD - vocab_size)).unflatten(1, (-1, 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=allowed.device)
    maps = (bits * weights).sum(2, dtype=torch.uint8).cpu().numpy().view(np.int32)
    rows = []
    first_id = first_map = 0
    for size in sizes.tolist():
        row = np.empty(1 + abs(size), dtype=np.int32)
        row[0] = size
        if size > 0:
            row[1:] = ids[first_id : first_id + size]
            first_id += size
        elif size < 0:
            row[1:] = maps[first_map]
            first_map += 1
        rows.append(row)
    return rows


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int32), *arrays])
