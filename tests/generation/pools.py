"""A stand-in for the allocator of vLLM's CUDA build: memory pools that sleep, in memory of the CPU.

All else is vLLM's own: the worker enters the pools, has them sleep and restores buffers.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOST = 255
"""Byte of memory that was used by others: NaN as a number, and beyond every table as an index."""


class Pools:
    """Storages by the pool that they were allocated in. ``calls`` names what vLLM asked for."""

    def __init__(self) -> None:
        self.calls = list[str]()
        self._storages = defaultdict[str, list[torch.UntypedStorage]](list)
        self._kept = dict[str, list[torch.UntypedStorage] | None]()

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        self.calls.append(f"allocate {tag}")
        with Allocations() as made:
            yield
        self._storages[tag] += filter(None, (each() for each in made.storages))

    def get_current_usage(self) -> int:
        return sum(each.nbytes() for pool in self._storages.values() for each in pool)

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for tag, storages in self._storages.items():
            kept = tag in offload_tags
            self.calls.append(f"{'copy' if kept else 'discard'} {tag}")
            self._kept[tag] = [each.clone() for each in storages] if kept else None
            for each in storages:
                as_bytes(each).fill_(LOST)

    def wake_up(self, tags: list[str]) -> None:
        from vllm.device_allocator import DEFERRABLE_TAGS

        for tag in [each for each in self._kept if each in tags or each not in DEFERRABLE_TAGS]:
            self.calls.append(f"wake {tag}")
            kept = self._kept.pop(tag)
            for number, each in enumerate(self._storages[tag]):
                assert as_bytes(each).eq(LOST).all(), f"memory of {tag} was used during the sleep"
                if kept is not None:
                    each.copy_(kept[number])


class Allocations(TorchDispatchMode):
    """Storages that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = list[weakref.ref[torch.UntypedStorage]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        made = (each.untyped_storage() for each in tensors(out))
        self.storages += [weakref.ref(each) for each in made if each._cdata not in given]
        return out


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of ``tree`` that have memory."""
    leaves = (each for each in tree_leaves(tree) if isinstance(each, torch.Tensor))
    return [each for each in leaves if each.device.type == "cpu"]


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


POOLS = Pools()
"""Pools of this process."""


def pretend() -> None:
    """Let vLLM's worker of CPUs have POOLS, as its worker of GPUs has those of the driver."""
    from vllm import device_allocator
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    device_allocator.get_mem_allocator_instance = lambda: POOLS
    type(current_platform).is_sleep_mode_available = lambda self: True
    CPUWorker._maybe_get_memory_pool_context = lambda self, tag: POOLS.use_memory_pool(tag)
    CPUWorker.sleep = Worker.sleep
    CPUWorker.wake_up = Worker.wake_up
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.get_memory_info = lambda *_: (0, 0)
