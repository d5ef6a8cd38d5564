"""How much memory a process has."""

import ctypes
import gc
import re
from pathlib import Path


def resident(field: str) -> int:
    """Bytes of this process's memory, what was freed given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
