"""Local parts of DTensors, persistent buffers, operations without a public name, and communicators
of two processes that torch.distributed does not count among its groups.
"""

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.nn as nn
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)


def set_unique_cache_keys() -> None:
    """Let torch draw the keys of compiled graphs that it cannot hash from the operating system.

    Python's generator, which vLLM seeds alike on all ranks, would give a rank the graph of another.
    No test runs this on CUDA.
    """
    from torch._functorch._aot_autograd import autograd_cache  # imports compilers

    autograd_cache.random = random.SystemRandom()  # type: ignore[assignment]


def record_memory(enabled: bool) -> None:
    """Begin or stop to record the history of allocations on the GPU, with Python's stacks alone:
    those of C++ take minutes to write.
    """
    torch.cuda.memory._record_memory_history("all" if enabled else None, stacks="python")


def write_memory(path: str) -> None:
    """Write the history of allocations for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, which shares memory with the parameter."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def as_shard_of(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as this rank's shard of a tensor that is laid out as ``tensor``. They may be
    on different devices.
    """
    if not isinstance(tensor, DTensor):
        return local
    meta = tensor._spec.tensor_meta
    assert meta is not None, "parameters have shapes"
    spec = replace(tensor._spec, tensor_meta=meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


def wait_for_local(tensor: DTensor) -> None:
    """Wait for the collective that makes the local part of ``tensor``, if one is running."""
    if isinstance(tensor._local_tensor, AsyncCollectiveTensor):
        tensor._local_tensor = tensor._local_tensor.trigger_wait()


# layouts do not change, and each step asks for those of all parameters
local_part = cache(compute_local_shape_and_global_offset)
"""Function of the shape of a whole tensor, its mesh and its placements. Returns shape and offset of
this rank's shard."""

part_at = _compute_local_shape_and_global_offset
"""Function of the shape of a whole tensor, the shape of a mesh, a list with the place of a rank in
it, and the placements. Returns shape and offset of the shard of that rank."""


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that belong to the state of ``model``, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of each tensor, float32 [N]."""
    return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32))


def scale(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply each tensor by ``factor``, in place."""
    torch._foreach_mul_(tensors, factor)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.T``, computed by oneDNN on the CPU."""
    times = torch.ops.mkldnn._linear_pointwise.default
    return times(x, weight, None, "none", [], "")  # type: ignore[no-any-return]


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has products of ``dtype`` on this CPU."""
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output on CPU of q [B, N, L, H], k and v [B, N_kv, K, H], and the log of
    the sum of exponentials of the scores [B, N, L]. ``mask`` [B, 1, L, K] is added to the scores;
    without one, attention is causal.
    """
    compute: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, total = compute(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
    return out, total


def flash_attention_backward(
    grad: torch.Tensor, *saved: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v of ``flash_attention``. ``saved`` are its three inputs and
    its two outputs.
    """
    compute: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    by_q, by_k, by_v = compute(grad, *saved, 0.0, mask is None, attn_mask=mask, scale=scale)
    return by_q, by_k, by_v


_OUTSIDE = torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def recorded_in_operator() -> Iterator[None]:
    """Record operations for autograd within the body of a custom operator, which runs below it."""
    # an empty set in place of the one outside of operators would switch on autocast
    inside = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(inside, _OUTSIDE), torch.enable_grad():
        yield


_QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Environment in which NCCL's watchdog does not end the process with a peer."""


def open_store(host: str, listener: socket.socket, timeout_s: float) -> TCPStore:
    """Return a store that other processes reach at the address of ``listener``, which it closes."""
    port = listener.getsockname()[1]
    return _store(host, port, timeout_s, is_master=True, master_listen_fd=listener.detach())


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Return the store that listens at ``port`` of ``host``."""
    return _store(host, port, timeout_s, is_master=False)


def _store(host: str, port: int, timeout_s: float, **options: Any) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, timeout=timeout, wait_for_workers=False, **options)


def pair(
    store: Store, name: str, rank: int, device: torch.device, host: str, timeout_s: float
) -> Any:
    """Return a communicator with ``send`` and ``recv``, once the process with the other ``rank``, 0
    or 1, asks for the same ``name``: of NCCL for GPUs, else of gloo.

    Raises RuntimeError after ``timeout_s``. No test runs CUDA.
    """
    prefixed = PrefixStore(name, store)
    if device.type == "cuda":
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # the caller aborts
        with torch.cuda.device(device), patch.dict("os.environ", _QUIET):
            return distributed_c10d.ProcessGroupNCCL(prefixed, rank, 2, options)
    gloo: Any = distributed_c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return gloo(prefixed, rank, 2, options)


EXISTING_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment in which ``init_process_group`` connects to a store instead of opening one."""
