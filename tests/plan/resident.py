"""Memory of this process."""

import ctypes
import gc
import re
from pathlib import Path


def resident(field: str) -> int:
    """Return the bytes of this process's memory after returning freed memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
