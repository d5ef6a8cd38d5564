"""What a real generator holds, for a plan to be compared with. Runs on ranks of their own."""

import ctypes
from pathlib import Path
from typing import Any


def held(engine: Any) -> dict[str, int]:
    """Bytes of parameters and KV cache."""
    runner = engine._engine.model_executor.driver_worker.model_runner
    caches = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in runner.kv_caches}
    parameters = engine._model.titan.parameters()
    return {
        "parameters": sum(parameter.untyped_storage().nbytes() for parameter in parameters),
        "KV cache": sum(caches.values()),
    }


def repacked(engine: Any) -> int:
    """By how many bytes of its own the process grows when weights are packed for oneDNN."""
    engine._model.weights_away()
    before = own_memory()
    engine._model.weights_changed()
    return own_memory() - before


def own_memory() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
