"""Memory of this process and of a real generator, to compare with plans."""

import ctypes
import gc
import re
from pathlib import Path
from typing import Any


def resident(field: str) -> int:
    """Return the bytes of this process's memory after returning freed memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def held(engine: Any) -> dict[str, int]:
    """Return the bytes of parameters and KV cache, and of records of experts if there are any."""
    from rl.compat.vllm_internals import runner_of

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
