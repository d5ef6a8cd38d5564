"""Memory of a real generator, to compare with plans. The functions run on separate ranks."""

from typing import Any

from rl.compat.vllm_internals import runner_of
from tests.plan.resident import resident


def held(engine: Any) -> dict[str, int]:
    """Bytes of parameters and KV cache, and of records of experts if there are any."""
    runner = runner_of(engine._engine)
    caches = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes()
        for cache in runner.kv_caches
    }
    parameters = engine._model.titan.parameters()
    records = engine._requests._records
    return {
        **({"records of experts": records._store.nbytes} if records else {}),
        "parameters": sum(parameter.untyped_storage().nbytes() for parameter in parameters),
        "KV cache": sum(caches.values()),
    }


def repacked(engine: Any) -> int:
    """Return the growth of the process's private memory when weights are packed for oneDNN."""
    engine._model.weights_away()
    before = resident("RssAnon")
    engine._model.weights_changed()
    return resident("RssAnon") - before
