"""Activations of a generator along tokens that are given instead of sampled."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rl.model.activations import Recorder
from rl.types import GivenSequence


@contextmanager
def forced(model, sequence: GivenSequence) -> Iterator[Recorder]:
    """Make ``model``, a TillerQwen3ForCausalLM that gets no other request, sample the tokens of
    ``sequence``; record its activations, logits and log-probs.
    """
    tokens = torch.tensor([*sequence.tokens])
    recorder = Recorder(model.titan, sequence.positions)
    kept = recorder.activations
    kept.logprobs = torch.full((len(tokens),), torch.nan)
    true_logits = model.compute_logits

    def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = true_logits(hidden_states)
        position = int(recorder.seen[-1])
        assert kept.logprobs is not None
        following = int(tokens[position + 1])
        row = logits[0].float().cpu()
        ids = None if sequence.sampling_mask is None else sequence.sampling_mask.ids(position + 1)
        if ids is not None:
            outside = torch.ones_like(row, dtype=torch.bool)
            outside[torch.from_numpy(ids)] = False
            row = row.masked_fill(outside, -torch.inf)
        kept.logprobs[position + 1] = (row / sequence.temperature).log_softmax(0)[following]
        if position in kept.positions:
            if kept.logits is None:
                kept.logits = torch.full((len(kept.positions), len(row)), torch.nan)
            kept.logits[kept.positions.index(position)] = row
        only = torch.full_like(logits, -torch.inf)
        only[:, following] = 0.0
        return only

    model.compute_logits = compute_logits
    try:
        with recorder:
            yield recorder
    finally:
        del model.compute_logits
