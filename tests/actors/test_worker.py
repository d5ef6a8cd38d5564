"""Order of a model worker's calls to its engine, and the outputs of several workers."""

import inspect
from types import SimpleNamespace

import torch

from rl.actors.worker import ModelWorker
from rl.actors.worker_group import _merge
from tests.kit.batches import ragged_batch, with_targets


def test_an_offload_waits_for_a_save_that_reads_the_weights():
    calls = []
    worker = SimpleNamespace(
        checkpointer=SimpleNamespace(wait_for_staging=lambda: calls.append("staging")),
        engine=SimpleNamespace(offload=lambda: calls.append("offload")),
    )
    inspect.unwrap(ModelWorker.offload._method)(worker)
    assert calls == ["staging", "offload"]


def test_outputs_of_shares_come_back_in_the_shape_of_the_targets():
    batch = with_targets(ragged_batch(), 3)
    whole = {"logprobs": batch.columns["weights"], "entropy": torch.rand(len(batch.tokens))}
    rows = [*range(len(batch))]
    shares = [rows[::2], rows[1::2]]
    parts = [{n: each[batch.token_index(own)] for n, each in whole.items()} for own in shares]
    merged = _merge(batch, shares, parts)
    assert {name: each.tolist() for name, each in merged.items()} == {
        name: each.tolist() for name, each in whole.items()
    }
