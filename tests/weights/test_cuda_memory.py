"""Memory and streams of GPUs, with the calls of CUDA recorded: no GPU is needed."""

import asyncio
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.model.shards import Shard
from rl.weights import cuda_memory, packed, shared_memory, transport
from rl.weights.cuda_memory import DeviceMemory
from rl.weights.transport import copy_all, open_publisher, open_subscriber, side_stream
from tests.weights.network import RANKS, initial, live_parts, same, trainer_parts, transfer

GPU = torch.device("cuda", 3)
PUSHES = 3


@pytest.mark.parametrize("own", [True, False])
def test_memory_is_used_on_the_gpu_that_has_it(monkeypatch, own):
    """``as_tensor`` copies the memory if it gets a device, and the memory is of another one."""
    calls = []
    contexts = []

    @contextmanager
    def on(device):
        contexts.append(device)
        yield
        contexts.append(None)

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(cuda_memory, "_driver", lambda *args: contexts.append(args[0]))
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch, "as_tensor", lambda *args, **options: calls.append((args, options)))
    DeviceMemory(handle=bytes(64), bytes=8, address=4096).tensor(GPU, own=own)
    (((memory,), options),) = calls
    assert memory.__cuda_array_interface__["data"] == (4096, False)
    assert options == {}
    assert contexts == ([] if own else [GPU, "cuIpcOpenMemHandle_v2", None])


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
    cuda_memory.pin(memory, GPU)
    cuda_memory.unpin(memory, GPU)
    assert calls == [("on", GPU), "register", "off", ("on", GPU), "unregister", "off"]
    cuda_memory.pin(memory, torch.device("cpu"))
    assert len(calls) == 6


class Streams:
    """Streams of a GPU as ``torch.cuda`` has them, which note what is done on them."""

    def __init__(self, monkeypatch) -> None:
        self.made = []
        self.copies = []
        self.waits = []
        self.active = [self.named("thread's")]
        default = self.named("default")
        monkeypatch.setattr(torch.cuda, "Stream", self.make)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: default)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.active[-1])
        monkeypatch.setattr(torch.cuda, "stream", self.using)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it waited"))

    def named(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.waits.append((name, other.name)),
            synchronize=lambda: self.waits.append(("host", name)),
        )

    def make(self, *_: Any) -> SimpleNamespace:
        self.made.append(self.named(f"side {len(self.made)}"))
        return self.made[-1]

    @contextmanager
    def using(self, stream: SimpleNamespace):
        self.active.append(stream)
        yield
        self.active.pop()


def on_gpu(streams: Streams):
    """Return a class of tensors that say that they are on a GPU, and note the stream of copies."""

    class OnGpu(torch.Tensor):
        device = GPU
        is_cuda = True

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func.__name__ == "copy_":
                streams.copies.append((streams.active[-1].name, kwargs.get("non_blocking")))
            return super().__torch_function__(func, types, args, kwargs or {})

    return OnGpu


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_all_pushes_copy_on_one_stream_beside_the_work_of_the_others(monkeypatch, transport):
    """torch keeps memory for the casts of each stream, and vLLM computes on a stream of its own."""
    streams = Streams(monkeypatch)
    of_gpu = on_gpu(streams)
    side_stream.cache_clear()
    monkeypatch.setattr(shared_memory, "pin", lambda *_: None)
    monkeypatch.setattr(shared_memory, "unpin", lambda *_: None)
    monkeypatch.setattr(packed, "_host_memory", lambda n, dtype, _: torch.zeros(n, dtype=dtype))
    weights = initial()

    def there(shards):
        return [Shard(shard.region, shard.tensor.as_subclass(of_gpu)) for shard in shards]

    moved = replace(transfer(generators=1), transport=transport)
    publishers = [
        open_publisher(moved, there(trainer_parts(weights, rank)), rank=rank)
        for rank in range(RANKS)
    ]
    addresses = [publisher.address for publisher in publishers]
    live = [live_parts(rank) for rank in range(RANKS)]
    subscribers = [
        open_subscriber(moved, addresses, there(shards), generator=0, rank=rank)
        for rank, shards in enumerate(live)
    ]
    with ExitStack() as ends:
        for end in (*publishers, *subscribers):
            ends.callback(end.close)
        for version in range(PUSHES):
            for publisher in publishers:
                await publisher.publish(version)
            await asyncio.gather(*(each.fetch(version) for each in subscribers))
            for subscriber in subscribers:
                subscriber.pull(version)
    side_stream.cache_clear()
    assert all(same(shards, weights, rank) for rank, shards in enumerate(live))
    assert len(streams.made) == 1
    assert {*streams.copies} == {("side 0", True)}
    turns = 2 * RANKS * PUSHES
    assert streams.waits.count(("host", "side 0")) == turns
    for other in ("default", "thread's"):
        assert streams.waits.count(("side 0", other)) == turns


class Memory:
    """Memory of a GPU. torch copies on the GPU of the source, and a pool is open to its own GPU."""

    is_cuda = True

    def __init__(self, index: int, holds: str = "", *, is_pool: bool = False) -> None:
        self.device = torch.device("cuda", index)
        self.holds = holds
        self.is_pool = is_pool

    def to(self, device: torch.device, *, non_blocking: bool) -> "Memory":
        new = Memory(device.index)
        return self if device == self.device else new.copy_(self, non_blocking=non_blocking)

    def copy_(self, source: "Memory", *, non_blocking: bool) -> "Memory":
        assert non_blocking and (self.device == source.device or not self.is_pool)
        self.holds = source.holds
        return self


@pytest.mark.parametrize("owner", [2, 3])
def test_weights_of_another_gpu_reach_a_memory_pool_through_other_memory(monkeypatch, owner):
    monkeypatch.setattr(transport, "beside", nullcontext)
    pool = Memory(3, is_pool=True)
    copy_all([(pool, Memory(owner, "weights"))], pool)
    assert pool.holds == "weights"
