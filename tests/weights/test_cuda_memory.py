"""Memory of GPUs, with the calls of CUDA recorded: no GPU is needed."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rl.weights import cuda_memory
from rl.weights.cuda_memory import DeviceMemory


@pytest.mark.parametrize("own", [True, False])
def test_memory_is_used_on_the_gpu_that_has_it(monkeypatch, own):
    """``as_tensor`` copies the memory if it gets a device, and the memory is of another one."""
    calls = []
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(cuda_memory, "_driver", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch, "as_tensor", lambda *args, **options: calls.append((args, options)))
    DeviceMemory(handle=bytes(64), bytes=8, address=4096).tensor(own=own)
    (((memory,), options),) = calls
    assert memory.__cuda_array_interface__["data"] == (4096, False)
    assert options == {}


def test_memory_is_pinned_on_the_gpu_that_copies(monkeypatch):
    calls = []

    @contextmanager
    def on(device):
        calls.append(("on", device))
        yield
        calls.append("off")

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append("register"),
        cudaHostUnregister=lambda *args: calls.append("unregister"),
    )
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    memory = torch.zeros(8, dtype=torch.uint8)
    gpu = torch.device("cuda", 3)
    cuda_memory.pin(memory, gpu)
    cuda_memory.unpin(memory, gpu)
    assert calls == [("on", gpu), "register", "off", ("on", gpu), "unregister", "off"]
    cuda_memory.pin(memory, torch.device("cpu"))
    assert len(calls) == 6
