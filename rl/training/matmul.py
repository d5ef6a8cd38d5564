"""Kernel of a trainer's float32 matrix products on CPU: MKL, which is torch's own, or oneDNN."""

import contextlib
import hashlib
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from rl.compat.torch_internals import onednn_linear

Kernel = Literal["mkl", "onednn"]

SLOWER = 1.3
"""Ratio of MKL's time to oneDNN's above which oneDNN is chosen: about 0.9 on Intel, 2 on AMD, and
1.1 on AMD with AVX-512."""
ROUNDS = 10
ROWS, INNER, COLUMNS = 1024, 256, 768

_registered: torch.library.Library | None = None  # keeps oneDNN's kernels registered


def use_kernel(kernel: Kernel) -> None:
    """Make ``kernel`` the CPU kernel of ``mm`` in this process, below autograd, DTensor and
    compiled code.
    """
    global _registered
    if kernel == kernel_in_use() or not torch.backends.mkldnn.is_available():
        return
    _registered = None
    if kernel == "onednn":
        _registered = torch.library.Library("aten", "IMPL")
        _registered.impl("mm", _onednn, "CPU", allow_override=True)
        _registered.impl("mm.out", _onednn_out, "CPU", allow_override=True)


def kernel_in_use() -> Kernel:
    """Return the kernel of float32 products in this process."""
    return "mkl" if _registered is None else "onednn"


def faster_kernel() -> Kernel:
    """Return the faster kernel on the first rank's host, on every rank.

    The first call on a host measures for tens of milliseconds and stores the choice in the user's
    cache. Later calls read it, so that all runs have the same numbers.
    """
    if not torch.backends.mkldnn.is_available():
        return "mkl"
    chosen = [_choice_of_host()]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(chosen)
    return chosen[0]


def _choice_of_host() -> Kernel:
    cpu = re.search("model name.*", Path("/proc/cpuinfo").read_text())
    host = hashlib.sha256(f"{cpu and cpu[0]} {torch.__config__.show()}".encode()).hexdigest()[:16]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tiller"
        stored = cache / f"cpu_matmul-{host}"
        if not stored.exists():
            _measure_and_store(stored)
        return "onednn" if stored.read_text() == "onednn" else "mkl"
    except (OSError, RuntimeError):  # no home, or a cache that this process cannot use
        return _measured_choice()


def _measure_and_store(path: Path) -> None:
    """Write the measured choice whole, unless another process was first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
        file.write(_measured_choice())
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)


def _measured_choice() -> Kernel:
    seconds = kernel_seconds()
    return "onednn" if seconds["mkl"] > SLOWER * seconds["onednn"] else "mkl"


def kernel_seconds() -> dict[Kernel, float]:
    """Return the CPU seconds of the products of a layer's forward and backward pass, by kernel."""
    x = torch.ones(ROWS, INNER)
    weight = torch.ones(COLUMNS, INNER)
    gradient = torch.ones(ROWS, COLUMNS)
    passes = [(x, weight.T), (gradient, weight), (gradient.T, x)]  # forward; gradients of x, weight
    kernels: dict[Kernel, Callable[..., torch.Tensor]] = {"mkl": _mkl, "onednn": _onednn}
    seconds: dict[Kernel, float] = dict.fromkeys(kernels, math.inf)
    for _ in range(ROUNDS):
        for name, multiply in kernels.items():
            began = time.thread_time()
            for a, b in passes:
                multiply(a, b)
            seconds[name] = min(seconds[name], time.thread_time() - began)
    return seconds


def _mkl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.addmm(a.new_zeros(()), a, b, beta=0)


def _onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not (a.dtype == b.dtype == torch.float32 and a.numel() and b.numel()):
        return _mkl(a, b)
    # oneDNN copies its left operand: pass the smaller matrix there
    if not a.is_contiguous() and b.numel() < a.numel():
        return onednn_linear(b.T, a).T
    return onednn_linear(a, b.T)


def _onednn_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_onednn(a, b))
