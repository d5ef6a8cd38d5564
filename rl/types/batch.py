"""Batch: what models compute on."""

from collections import abc
from dataclasses import dataclass, field

import torch

from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of unequal length, end to end, with per-token columns.

    ``tokens`` int64 [T], ``lengths`` int64 [N] with sum T, ``loss_weights`` float32 [T] and every
    column float32 [T]. Entry ``t`` of a column is about *predicting* token ``t``, so the first
    token of each sequence always has weight 0. Prompt tokens have weight 0 too.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    loss_weights: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    rollouts: torch.Tensor | None = None
    """Index of the rollout of each sequence, int64 [N]; None if each sequence is a rollout."""
    sampling_mask: SamplingMask | None = None
    """Ids that each token was sampled from, to which the log-probs of every policy are
    renormalized; None if all tokens were sampled from the whole vocabulary."""
    rows: abc.Sequence[int] | None = None
    """Indices of the sequences in the batch that they were selected from; None for a whole
    batch."""
    reduction: str | None = None
    """Reduction that the loss weights contain: see :func:`rl.algorithms.batch.reduced`. None if
    they contain none; ``Session.forward_backward`` then applies that of the loss."""
    denominators: torch.Tensor | None = None
    """Part of each sequence in the denominator of ``optim_step``, float64 [N]; None for the sum of
    its loss weights."""
    targets: torch.Tensor | None = None
    """Ids whose log-probs are computed in place of those of ``tokens``, int64 [T], or [T, K] for K
    ids at each token; -1 is not an id, with log-prob 0. Entry ``t`` is about the prediction after
    the tokens before ``t``. None for the tokens themselves.

    The output ``logprobs`` has the shape of the targets, and so may columns. Sequences with targets
    share no prompts."""
    experts: RoutedExperts | None = None
    """Experts that computed each token as an input in the generator; None if none were recorded."""
    together: int = 1
    """Number of sequences in a row, from the first on, that one micro-batch must have: those that a
    loss compares. Divides N."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def rows_by_rollout(self) -> list[list[int]]:
        """Indices of the sequences of each rollout, in order."""
        if self.rollouts is None:
            return [[row] for row in range(len(self))]
        rows: dict[int, list[int]] = {}
        for row, rollout in enumerate(self.rollouts.tolist()):
            rows.setdefault(rollout, []).append(row)
        return [*rows.values()]

    def token_index(self, rows: abc.Sequence[int]) -> torch.Tensor:
        """Return the indices, int64, of all tokens of the given sequences, in the given order."""
        index = torch.tensor(rows, dtype=torch.int64)
        starts = (self.lengths.cumsum(0) - self.lengths)[index]
        lengths = self.lengths[index]
        owner = torch.repeat_interleave(torch.arange(len(index)), lengths)
        return torch.arange(len(owner)) + (starts - (lengths.cumsum(0) - lengths))[owner]

    @property
    def owners(self) -> torch.Tensor:
        """Index of the sequence of each token, int64 [T]."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @property
    def loss_mask(self) -> torch.Tensor:
        """Mask of tokens with a weight above 0, bool [T]."""
        return self.loss_weights > 0

    @property
    def divisors(self) -> torch.Tensor:
        """Part of each sequence in the denominator of ``optim_step``, float64 [N]."""
        if self.denominators is not None:
            return self.denominators
        return torch.zeros(len(self)).double().index_add(0, self.owners, self.loss_weights.double())

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """Return a column with ``values`` for tokens of weight above 0, and 0 for the others."""
        column = torch.zeros(len(self.tokens))
        column[self.loss_mask] = values
        return column

    def shares(
        self, count: int, units: abc.Iterable[abc.Sequence[int]] | None = None
    ) -> list[list[int]]:
        """Divide the sequences into ``count`` parts for :meth:`select`. Returns the indices of the
        sequences of each part.

        The parts' numbers of sequences differ by at most ``together``, and their numbers of tokens
        are similar: each of ``units``, longest first, goes to the part with the fewest tokens so
        far (Graham, 1969), or if no part has room for it, each of its sequences does. By default a
        unit has ``together`` sequences.
        """
        own = [
            [*range(first, first + self.together)] for first in range(0, len(self), self.together)
        ]
        most = -(-len(own) // count) * self.together
        shares: list[list[int]] = [[] for _ in range(count)]
        lengths = self.lengths.tolist()
        tokens = [0] * count

        def size(unit: abc.Sequence[int]) -> int:
            return sum(lengths[row] for row in unit)

        for unit in sorted(
            own if units is None else units, key=lambda rows: (-size(rows), rows[0])
        ):
            has_room = any(len(share) + len(unit) <= most for share in shares)
            for piece in [unit] if has_room else [[row] for row in unit]:
                open_parts = [
                    p for p, share in enumerate(shares) if len(share) + len(piece) <= most
                ]
                part = min(open_parts, key=tokens.__getitem__)
                shares[part] += piece
                tokens[part] += size(piece)
        return [sorted(share) for share in shares]

    def select(self, rows: abc.Sequence[int]) -> "Batch":
        """Return the given sequences, in the given order."""
        index = self.token_index(rows)
        chosen = torch.tensor(rows, dtype=torch.int64)
        mask = self.sampling_mask
        return Batch(
            tokens=self.tokens[index],
            lengths=self.lengths[chosen],
            loss_weights=self.loss_weights[index],
            columns={name: values[index] for name, values in self.columns.items()},
            rollouts=None if self.rollouts is None else self.rollouts[chosen],
            sampling_mask=None if mask is None else mask.select(index.numpy()),
            rows=rows,
            reduction=self.reduction,
            denominators=None if self.denominators is None else self.denominators[chosen],
            targets=None if self.targets is None else self.targets[index],
            experts=None if self.experts is None else self.experts.select(index.numpy()),
            together=self.together,
        )
