"""Experts that computed tokens of a mixture-of-experts model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Experts of T tokens in every layer: those that computed a token as an input.

    A token without a record, as one that no generator computed, has the largest number of the dtype
    in all entries. The last token of a sequence is not an input, and has no record.
    """

    ids: np.ndarray
    """uint8 or uint16 [T, layers, experts per token]."""

    @classmethod
    def none(cls, count: int, like: "RoutedExperts") -> Self:
        """Return ``count`` tokens without a record, in the form of ``like``."""
        shape = (count, *like.ids.shape[1:])
        return cls(np.full(shape, _none(like.ids.dtype), dtype=like.ids.dtype))

    @classmethod
    def joined(cls, parts: Sequence["RoutedExperts"]) -> Self:
        """Return the tokens of all ``parts``, in order."""
        return cls(np.concatenate([part.ids for part in parts]))

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutedExperts) and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple:
        """Pickle leading tokens without a record as their number alone."""
        missing = len(self) - int(np.maximum.accumulate(self.known).sum())
        return _with_leading_none, (missing, self.ids[missing:])

    @property
    def known(self) -> np.ndarray:
        """Whether each token has a record, bool [T]."""
        known: np.ndarray = self.ids[:, 0, 0] != _none(self.ids.dtype)
        return known

    def select(self, index: np.ndarray) -> "RoutedExperts":
        """Return the tokens ``index``, int [N], in this order."""
        return RoutedExperts(self.ids[index])


def _with_leading_none(count: int, ids: np.ndarray) -> RoutedExperts:
    known = RoutedExperts(ids)
    return RoutedExperts.joined([RoutedExperts.none(count, known), known])


def dtype_of(num_experts: int) -> np.dtype:
    """Return the smallest integers that hold ids of ``num_experts`` experts and one more number."""
    return np.dtype(np.uint8 if num_experts <= _none(np.dtype(np.uint8)) else np.uint16)


def _none(dtype: np.dtype) -> int:
    return int(np.iinfo(dtype).max)
