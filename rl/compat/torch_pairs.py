"""Communicators of two processes that torch.distributed does not count among its groups."""

import socket
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d

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
    kept = PrefixStore(name, store)
    if device.type == "cuda":
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # the caller aborts
        with torch.cuda.device(device), patch.dict("os.environ", _QUIET):
            return distributed_c10d.ProcessGroupNCCL(kept, rank, 2, options)
    gloo: Any = distributed_c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return gloo(kept, rank, 2, options)
