"""Sampling masks on the trainer's device, for the cells of a micro-batch."""

from dataclasses import dataclass

import numpy as np
import torch

from rl.training.context import SequenceShard
from rl.types.sampling_mask import WORD, SamplingMask

FLOOR = -1e30
"""Logit of a token outside its set. Its probability is 0; products with infinity would be NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLogits:
    """Logits that the sampling masks of N cells keep. Its methods do not wait for the device."""

    ids: torch.Tensor
    """int32 [K], the ids of all sets that are lists."""
    owners: torch.Tensor
    """int32 [K], the cell of each of these ids, ascending."""
    listed: torch.Tensor
    """bool [N], whether the set of the cell is a list."""
    maps: torch.Tensor
    """int32 [M, W], the sets that are bitmaps."""
    mapped: torch.Tensor
    """int32 [M], the cell of each of these bitmaps, ascending."""
    id_ends: np.ndarray
    """int64 [N + 1], number of ids before each cell, on the host."""
    map_ends: np.ndarray
    """int64 [N + 1], number of bitmaps before each cell, on the host."""
    first: int = 0
    """Id of the first logit of this rank."""

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> "KeptLogits":
        """Return the sets of ``mask``, whose tokens are the cells, on ``device``."""
        sizes = mask.sizes
        is_id = np.repeat(sizes > 0, np.abs(sizes))
        cells = np.arange(len(sizes), dtype=np.int32)
        mapped = cells[sizes < 0]
        maps = mask.words[~is_id].reshape(len(mapped), -1 if len(mapped) else 0)
        return cls(
            ids=torch.from_numpy(mask.words[is_id]).to(device),
            owners=torch.from_numpy(np.repeat(cells, sizes.clip(min=0))).to(device),
            listed=torch.from_numpy(sizes > 0).to(device),
            maps=torch.from_numpy(maps).to(device),
            mapped=torch.from_numpy(mapped).to(device),
            id_ends=_ends(sizes.clip(min=0)),
            map_ends=_ends(sizes < 0),
        )

    def apply_(self, logits: torch.Tensor, cells: slice) -> torch.Tensor:
        """Set the logits [n, words] of ``cells`` that are outside their sets to FLOOR; return
        ``logits``.
        """
        count = logits.shape[1]
        # The last column is for ids of other ranks.
        outside = self.listed[cells].unsqueeze(1).repeat(1, count + 1)
        part = slice(self.id_ends[cells.start], self.id_ends[cells.stop])
        ids = self.ids[part].long() - self.first
        ids = torch.where((ids >= 0) & (ids < count), ids, count)
        outside[self.owners[part].long() - cells.start, ids] = False
        part = slice(self.map_ends[cells.start], self.map_ends[cells.stop])
        if part.start < part.stop:
            first = self.first // WORD
            last = -(-(self.first + count) // WORD)
            words = self.maps[part, first:last].contiguous().view(torch.uint8)
            bits = torch.arange(8, dtype=torch.uint8, device=words.device)
            flags = (words.unsqueeze(2) >> bits).bitwise_and_(1).flatten(1)
            begin = self.first - first * WORD
            rows = self.mapped[part].long() - cells.start
            outside[rows, :count] = flags[:, begin : begin + count] == 0
        return logits.masked_fill_(outside[:, :count], FLOOR)


def kept_logits(
    mask: SamplingMask | None, sequence: SequenceShard | None, device: torch.device
) -> KeptLogits | None:
    """Return the sets of this rank's cells on ``device``; None without a ``mask``."""
    if mask is None:
        return None
    return KeptLogits.of(mask if sequence is None else sequence.select(mask), device)


def _ends(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], counts.cumsum(dtype=np.int64)])
