"""A CUDA device that torch's Python believes in: tensors with shapes and no numbers, no driver.

``pretend`` changes torch for the rest of the process. Only ``rl.plan.rehearsal`` calls it, in a
process of its own.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # compares signatures of functions that pretend replaces
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves  # for rl.plan.rehearsal
from torch.utils._pytree import tree_map_only as tree_map_only

ONE_KERNEL = ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
"""Operators that are one kernel on CUDA. A torch without CUDA would compute them from others."""


class Device(TorchDispatchMode):
    """Device that ``pretend`` asks and tells. Every operator passes through it while it is active.

    ``count`` is the number of GPUs that the process sees. ``ledger`` has ``used`` and ``peak``
    bytes, and records a ``resize`` and a ``wait`` of the host.
    """

    def __init__(self, name: str, bytes: int, capability: tuple[int, int], count: int, ledger: Any):
        super().__init__()
        self.name = name
        self.bytes = bytes
        self.capability = capability
        self.count = count
        self.ledger = ledger
        self.numbers: dict[int, int] = {}
        """Number in the ledger of each storage on the device, by the storage's key."""


def is_working_out_shapes() -> bool:
    """Return whether a fake mode of torch itself, such as that of DTensor, is active."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def mutates(operator: Any) -> bool:
    """Return whether the operator writes into one of its arguments."""
    return bool(operator._schema.is_mutable)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that is equal for views of one storage while the storage exists."""
    return storage._cdata


def as_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """Return the fake tensor of a host tensor, or of a meta tensor that C++ made for the device."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.device.type == "meta":
        return FakeTensor(mode, tensor, device=_current())
    return mode.fake_tensor_converter.from_real_tensor(mode, tensor)


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class HostCalls(TorchFunctionMode):
    """Calls whose C++ asks for a driver before any operator runs: pinned memory, and ``cuda``
    without an index.
    """

    def __init__(self, pinned: Callable[[torch.Tensor], None]):
        """Pass each new pinned tensor to ``pinned``."""
        super().__init__()
        self._pinned = pinned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            tensor = func(*args, **kwargs | {"pin_memory": False})
            self._pinned(tensor)
            return tensor
        if func is torch.Tensor.cuda:
            return args[0].to(_current())
        if func is torch.Tensor.set_ and isinstance(args[0], FakeTensor):
            return _whole(args[0], args[1])
        if func in (torch.Tensor.to, torch.tensor):
            args = tuple(map(_indexed, args))
            kwargs = {name: _indexed(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def __enter__(self) -> "HostCalls":
        # torch.tensor(..., device="cuda") is made on the host, then moved
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self


def _whole(tensor: FakeTensor, storage: torch.UntypedStorage) -> FakeTensor:
    """Return a tensor like ``tensor`` of all of ``storage``."""
    with torch._C._DisableTorchDispatch():
        whole = torch.empty(0, dtype=tensor.dtype, device="meta").set_(storage)
    return FakeTensor(tensor.fake_mode, whole, device=tensor.fake_device)


def _indexed(value: Any) -> Any:
    bare = isinstance(value, str | torch.device) and str(value) == "cuda"
    return _current() if bare else value


class Done:
    """A stream on which all work is done, or an event that has happened."""

    def __init__(self, *_: Any, **__: Any):
        self.device = _current()
        self.stream_id = id(self)
        self.cuda_stream = 0

    def wait(self, *_: Any) -> None: ...

    wait_stream = wait_event = synchronize = wait

    def query(self) -> bool:
        return True

    def record(self, *_: Any) -> "Done":
        return self

    def record_event(self, event: "Done | None" = None) -> "Done":
        return event or self

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def __enter__(self) -> "Done":
        return self

    def __exit__(self, *_: Any) -> None: ...


_kernels = torch.library.Library("aten", "IMPL")


def pretend(device: Device) -> None:
    """Let torch's Python believe in ``device`` for the rest of the process."""
    for name in ONE_KERNEL:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _kernels.impl(name, _never_called, "CUDA")
    _tensors()
    _storages(device)
    _driver(device)
    torch.autograd.set_multithreading_enabled(False)  # modes belong to a thread
    optimizer: Any = torch.optim.Optimizer
    optimizer._accelerator_graph_capture_health_check = lambda self: None
    collectives: Any = distributed_c10d
    collectives._get_object_coll_device = lambda group=None: _current()


def _never_called(*_: Any) -> None:
    raise NotImplementedError("fake tensors have no kernels")


def _tensors() -> None:
    """Let fake tensors, and the tensors that wrap them, name the fake device."""
    make = torch.Tensor._make_subclass

    def make_subclass(cls: type, data: Any, requires_grad: bool = False, **options: Any) -> Any:
        if issubclass(cls, FakeTensor):  # autograd's engine may see the meta tensor below
            options["dispatch_device"] = False
        return make(cls, data, requires_grad, **options)

    tensor: Any = torch.Tensor
    tensor._make_subclass = staticmethod(make_subclass)
    tensor.pin_memory = lambda self, *_: self
    fake: Any = FakeTensor
    fake.record_stream = lambda self, stream: None
    fake.tolist = lambda self: self.cpu().tolist()  # one copy, not one for each element
    inner = {FakeTensor: None, DTensor: "_local_tensor", AsyncCollectiveTensor: "elem"}
    for kind, part in inner.items():
        _name_device(kind, part)
    vars(fake_tensor)["init_gpu_context"] = lambda device: None
    mode: Any = FakeTensorMode
    mode.avoid_device_init = property(lambda self: True)
    core: Any = torch._C
    core._group_tensors_by_device_and_dtype = _grouped


def _name_device(kind: Any, part: str | None) -> None:
    if part is not None:
        kind.device = property(lambda self: getattr(self, part).device)
    kind.is_cuda = property(lambda self: self.device.type == "cuda")
    kind.is_cpu = property(lambda self: self.device.type == "cpu")
    kind.is_meta = property(lambda self: self.device.type == "meta")


def _grouped(lists: Sequence[Sequence[Any]], with_indices: bool = False) -> dict[Any, Any]:
    """Return the columns of ``lists`` by device and dtype of their first tensor. A list may be
    empty.
    """
    groups: dict[Any, tuple[list[list[Any]], list[int]]] = {}
    for index in range(len(lists[0])):
        column = [tensors[index] if tensors else None for tensors in lists]
        first = next(tensor for tensor in column if tensor is not None)
        key = (first.device, first.dtype)
        columns, indices = groups.setdefault(key, ([[] for _ in lists], []))
        for group, tensors, tensor in zip(columns, lists, column, strict=True):
            if tensors:
                group.append(tensor)
        indices.append(index)
    return {key: (group, places if with_indices else []) for key, (group, places) in groups.items()}


def _storages(device: Device) -> None:
    """Let the storages of device tensors name the device, and tell it their sizes."""
    storage: Any = torch.UntypedStorage
    resize = storage.resize_
    base: Any = torch._C.StorageBase
    own_device = base.device
    own_address = base.data_ptr

    def resize_(self: Any, size: int) -> Any:
        resized = resize(self, size)
        if self._cdata in device.numbers:
            device.ledger.resize(device.numbers[self._cdata], int(size))
        return resized

    storage.resize_ = resize_
    storage.device = property(
        lambda self: _current() if self._cdata in device.numbers else own_device.__get__(self)
    )
    storage.data_ptr = lambda self: (
        self._cdata if self._cdata in device.numbers else own_address(self)
    )


def _driver(device: Device) -> None:
    """Replace the functions of ``torch.cuda`` and ``torch.accelerator`` that ask the driver."""
    cuda: Any = torch.cuda
    for name, answer in (_memory(device) | _facts(device) | _streams(device)).items():
        setattr(cuda, name, answer)
    done = 0  # what the driver's library returns
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: done, cudaHostUnregister=lambda address: done
    )
    cuda.cudart = lambda: runtime
    cuda.check_error = lambda status: None
    accelerator: Any = torch.accelerator
    accelerator.current_stream = cuda.current_stream
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.is_available = lambda: True
    version: Any = torch.version
    version.cuda = version.cuda or "13.0"


def _memory(device: Device) -> dict[str, Callable[..., Any]]:
    return {
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (device.bytes - device.ledger.used, device.bytes),
        "memory_allocated": lambda *_: device.ledger.used,
        "max_memory_allocated": lambda *_: device.ledger.peak,
        "max_memory_reserved": lambda *_: device.ledger.peak,
        "memory_stats": lambda *_: defaultdict(int),
        "reset_peak_memory_stats": lambda *_: None,
    }


def _facts(device: Device) -> dict[str, Callable[..., Any]]:
    properties = SimpleNamespace(
        name=device.name,
        total_memory=device.bytes,
        major=device.capability[0],
        minor=device.capability[1],
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        regs_per_multiprocessor=65536,
        gcnArchName="",
    )
    chosen = [0]

    def set_device(which: Any) -> None:
        chosen[0] = which if isinstance(which, int) else torch.device(which).index

    return {  # a function for each name: torch.compile has a rule for each of them
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "device_count": lambda: device.count,
        "current_device": lambda: chosen[0],
        "set_device": set_device,
        "get_device_capability": lambda *_: device.capability,
        "get_device_name": lambda *_: device.name,
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "can_device_access_peer": lambda *_: True,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "seed": lambda: None,
        "initial_seed": lambda: 0,
    }


def _streams(device: Device) -> dict[str, Callable[..., Any]]:
    default = cache(Done)
    entered: list[Done] = []

    def current_stream(*_: Any) -> Done:
        return entered[-1] if entered else default()

    @contextlib.contextmanager
    def stream(chosen: Done | None) -> Iterator[None]:
        entered.append(chosen or current_stream())
        try:
            yield
        finally:
            entered.pop()

    return {
        **dict.fromkeys(("Stream", "ExternalStream", "Event"), Done),
        "current_stream": current_stream,
        "default_stream": lambda *_: default(),
        "stream": stream,
        "device": contextlib.nullcontext,
        "synchronize": lambda *_: device.ledger.wait("torch.cuda.synchronize"),
    }
