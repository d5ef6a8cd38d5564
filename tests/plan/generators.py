"""What a real generator holds, for a plan to be compared with. Runs on ranks of their own."""

from typing import Any

from rl.compat.vllm_internals import runner_of
from tests.plan.resident import resident


def held(engine: Any) -> dict[str, int]:
    """Bytes of parameters and KV cache."""
    runner = runner_of(engine._engine)
    caches = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes()
        for cache in runner.kv_caches
    }
    parameters = engine._model.titan.parameters()
    return {
        "parameters": sum(parameter.untyped_storage().nbytes() for parameter in parameters),
        "KV cache": sum(caches.values()),
    }


def repacked(engine: Any) -> int:
    """By how many bytes of its own the process grows when weights are packed for oneDNN."""
    engine._model.weights_away()
    before = resident("RssAnon")
    engine._model.weights_changed()
    return resident("RssAnon") - before
