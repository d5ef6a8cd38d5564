"""Order of a model worker's calls to its engine."""

from types import SimpleNamespace

from rl.actors.worker import ModelWorker


def test_an_offload_waits_for_a_save_that_reads_the_weights():
    calls = []
    worker = SimpleNamespace(
        checkpointer=SimpleNamespace(wait_for_staging=lambda: calls.append("staging")),
        engine=SimpleNamespace(offload=lambda: calls.append("offload")),
    )
    ModelWorker._offload(worker)
    assert calls == ["staging", "offload"]
