"""Speed of this host's processor."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from rl.compat.torch_internals import onednn_linear

Kernel = Literal["mkl", "onednn"]
"""Kernel of float32 products on CPU. MKL is torch's own."""

SIZE = 512  # rows and columns of the products
COPIED = 2**26  # bytes, more than a cache holds
BUDGET = 0.1  # seconds for each figure
PROCESSES = 8  # that measure
FASTER = 1.5  # kernels whose speeds differ by less than this factor count as equal


class CpuSpeed(NamedTuple):
    """Speed of one thread."""

    float32_tflops: float
    bfloat16_tflops: float
    memory_gb_s: float
    """Bytes that a copy reads and writes, in GB/s."""

    onednn_tflops: float
    """Speed of float32 products by oneDNN; 0 if torch has none."""


@cache
def cpu_speed() -> CpuSpeed:
    """Return the highest speed of this kind of processor that the user's processes have measured.

    Other programs slow a measurement, which takes half a second. The first ``PROCESSES`` processes
    measure, and keep what they find in the user's cache folder.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiller"
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    facts = [line for line in lines if re.match("(model|flags|cpu family|stepping|Feature)", line)]
    kind = "\n".join([*facts, torch.__version__])
    file = folder / f"cpu-{hashlib.sha256(kind.encode()).hexdigest()[:16]}.json"
    try:
        known = [CpuSpeed(*map(float, figures)) for figures in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError):  # missing or damaged
        known = []
    if len(known) < PROCESSES:
        known.append(_measured())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(known))
        except OSError:  # a home that is read-only: measure again next time
            pass
    return CpuSpeed(*map(max, zip(*known, strict=True)))


def faster_kernel() -> Kernel:
    """Return the faster kernel of float32 products on this kind of processor."""
    speed = cpu_speed()
    return "onednn" if speed.onednn_tflops > FASTER * speed.float32_tflops else "mkl"


def _measured() -> CpuSpeed:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        factor = torch.ones(SIZE, SIZE)
        products = [
            partial(torch.matmul, factor, factor),
            partial(torch.matmul, factor.bfloat16(), factor.bfloat16()),
        ]
        if torch.backends.mkldnn.is_available():
            products.append(partial(onednn_linear, factor, factor))
        float32, bfloat16, *onednn = (2 * SIZE**3 / _fastest(work) / 1e12 for work in products)
        source = torch.ones(COPIED, dtype=torch.uint8)
        target = torch.ones_like(source)
        copy = _fastest(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    return CpuSpeed(float32, bfloat16, 2 * COPIED / copy / 1e9, *(onednn or [0.0]))


def _fastest(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of several calls: other programs slow some of them."""
    times = list[float]()
    end = time.thread_time() + BUDGET
    while len(times) < 3 or time.thread_time() < end:
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)
