"""Fake CUDA device: every operator passes through a mode that knows shapes, devices and sizes."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl.compat.fake_cuda import (
    Device,
    FakeTensor,
    FakeTensorMode,
    HostCalls,
    as_fake,
    is_working_out_shapes,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from rl.host.platform import GROUPED_ON, discard
from rl.plan.rehearsal import shadows
from rl.plan.rehearsal.device_ledger import Ledger
from rl.plan.rehearsal.shadows import set_shadow, shadow_of

ITEMS = ("aten._local_scalar_dense.default", "aten.item.default", "aten.is_nonzero.default")
COUNTING = (
    "aten.nonzero.default",
    "aten.repeat_interleave.Tensor",
    "aten.masked_select.default",
    "aten.unique_consecutive.default",
    "aten._unique2.default",
)
"""Operators for whose result the host waits, because numbers determine the shape."""
PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
INDEXED = (
    "aten.index.Tensor",
    "aten.index_put.default",
    "aten.index_put_.default",
    "aten._index_put_impl_.default",
)
JOINED = ("aten.cat.default", "aten.stack.default")
COPIES = ("aten._to_copy.default", "aten.copy_.default")
GROUPED = "aten._grouped_mm.default"
KEYS_AND_VALUES = "cplib."
"""Operators that gather or reduce keys and values together."""
COLLECTIVES = (
    "c10d.",
    "_c10d_functional.",
    "_c10d_functional_autograd.",
    "_dtensor.",
    KEYS_AND_VALUES,
)
KINDS = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class FakeCuda(Device):
    """GPU of one rank. While the mode is active, tensors of the host are real, tensors on ``cuda``
    have no numbers, and copies to the host are zeros or known numbers.

    ``rl.compat.fake_cuda.pretend`` must have been called with this device.
    """

    def __init__(self, name: str, bytes: int, capability: tuple[int, int], count: int):
        super().__init__(name, bytes, capability, count, Ledger())
        self.routes_evenly = True
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._last = 0
        self._host_calls = HostCalls(self._pin)

    def __enter__(self) -> "FakeCuda":
        self._host_calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._host_calls.__exit__(*error)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Raise RuntimeError for what a CUDA graph cannot capture: waits of the host, shapes that
        depend on numbers, and copies between host and device.
        """
        self.ledger.captures = True
        yield
        self.ledger.captures = False

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the ledger's key of the storage of ``tensor``; None if it is on the host."""
        return self.numbers.get(storage_key(tensor.untyped_storage()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(kind in KINDS or issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # DTensor and other wrappers first
        if is_working_out_shapes():  # nothing that runs
            return func(*args, **kwargs)
        name = str(func)
        fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if not fakes and target != "cuda":
            if is_collective(name):
                _require_device_tensors(name, args, kwargs)
            return func(*args, **kwargs)
        if target == "meta":  # C++ asks for the device that it saw
            kwargs = kwargs | {"device": fakes[0].fake_device}
        if name in ITEMS:
            return self._item(args[0])
        _require_what_kernels_take(name, args)
        if fakes and target == "cpu" and name == "aten._to_copy.default":
            source = args[0]
            dtype = kwargs.get("dtype") or source.dtype
            self._wait_for_copy(kwargs)
            return self._numbers_of(source).to(dtype).clone()
        if name == "aten.copy_.default" and not isinstance(args[0], FakeTensor):
            self._wait_for_copy({"non_blocking": args[2:3] == (True,)} | kwargs)
            storage = args[0].untyped_storage()
            if args[0].dtype == torch.uint8 and args[0].nbytes == storage.nbytes():
                discard(storage)  # zeros without memory: the host may have less than the plan's
                return args[0]
            with torch.no_grad():
                return args[0].copy_(self._numbers_of(args[1]))
        return self._run(func, name, args, kwargs, fakes)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any, fakes: list[FakeTensor]) -> Any:
        """Return the result of an operator of the device, and record what it does."""
        if self.ledger.captures:
            hosts = [tensor for tensor in _tensors((args, kwargs)) if tensor.device.type == "cpu"]
            # kernels take single numbers as arguments
            if any(tensor.dim() or name in COPIES for tensor in hosts):
                self.ledger.wait("copy from the host")
        if name == GROUPED and self.capability[0] not in GROUPED_ON:
            self.ledger.wait("offsets of grouped products")
        if name in COUNTING and kwargs.get("output_size") is None:
            self.ledger.wait(f"shape of {func.overloadpacket.__name__}")
        if name == "aten.log_sigmoid_backward.default":  # whose meta kernel takes one device
            return torch.empty_like(args[1])
        if name in INDEXED and any(index.dtype == torch.bool for index in _tensors([args[1]])):
            self.ledger.wait("shape of an index by a mask")
            args = (args[0], self._without_masks(args[1]), *args[2:])
        if is_collective(name):
            _require_device_tensors(name, args, kwargs)
        if name == "c10d.allgather_.default":
            for outputs, part in zip(args[0], args[1], strict=True):  # the same on all ranks
                numbers = shadow_of(part)
                for output in outputs:
                    set_shadow(output, None if numbers is None else numbers.clone())
        numbers = shadows.computed(func, args, kwargs)
        if numbers is not None and name in shadows.COUNTED:
            device = fakes[0].device if fakes else kwargs["device"]
            out = tree_map_only(torch.Tensor, lambda real: self._known(real, device), numbers)
        else:
            convert = lambda tensor: as_fake(self._fake, tensor)  # noqa: E731
            fake_args, fake_kwargs = tree_map_only(torch.Tensor, convert, (args, kwargs))
            with self._fake:
                out = func(*fake_args, **fake_kwargs)
            if name in shadows.FILLED:
                numbers = shadows.filled(name, args, out)
            shadows.attach(out, numbers)
            if name == "aten.topk.default" and numbers is None:
                self._balance(out[1], args[0].shape[-1])
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                if tensor.fake_device.type == "meta":  # C++ asked for the device that it saw
                    tensor.fake_device = fakes[0].fake_device
                if tensor.fake_device.type == "cuda":
                    self._count(tensor.untyped_storage(), name)
        if is_collective(name):
            groups = [args, out] if name.startswith(KEYS_AND_VALUES) else [*args, out]
            sizes = [sum(tensor.nbytes for tensor in _tensors(group)) for group in groups]
            if any(sizes):
                self.ledger.collective(name.split(".")[1].strip("_"), max(sizes))
        return out

    def _pin(self, tensor: torch.Tensor) -> None:
        self.ledger.pin(tensor.nbytes)
        discard(tensor.untyped_storage())

    def _item(self, tensor: torch.Tensor) -> Any:
        self.ledger.wait("a number of the device")
        known = shadow_of(tensor)
        if known is not None:
            return known.item()
        self.ledger.assume("a number of the device is 1")
        if tensor.dtype == torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else 1

    def _wait_for_copy(self, kwargs: Any) -> None:
        if self.ledger.captures or not kwargs.get("non_blocking"):
            self.ledger.wait("copy to the host")

    def _numbers_of(self, source: torch.Tensor) -> torch.Tensor:
        known = shadow_of(source)
        if known is not None:
            return known
        if not source.is_floating_point():
            self.ledger.assume("integers that are copied to the host are 0")
        return torch.zeros(source.shape, dtype=source.dtype)

    def _without_masks(self, indices: Any) -> list[Any]:
        """Return the indices with masks as the numbers of their true elements."""
        result: list[Any] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                result.append(index)
                continue
            mask = shadow_of(index)
            if mask is None:
                self.ledger.assume("a mask is true everywhere")
                mask = torch.ones(index.shape, dtype=torch.bool)
            on_device = index.device.type == "cuda"
            for places in mask.nonzero(as_tuple=True):
                result.append(self._known(places, index.device) if on_device else places)
        return result

    def _known(self, numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a device tensor of known numbers."""
        with self._fake:
            fake = torch.empty(numbers.shape, dtype=numbers.dtype, device=device)
        set_shadow(fake, numbers)
        return fake

    def _balance(self, chosen: torch.Tensor, choices: int) -> None:
        """Let a router choose each expert equally often, unless ``routes_evenly`` is False. Equal
        numbers of tokens have the same choice, since activations are recomputed.
        """
        self.ledger.assume("routers choose each expert equally often")
        numbers = torch.arange(chosen.numel()).view(chosen.shape)
        if not self.routes_evenly:
            draw = torch.Generator().manual_seed(chosen.numel())
            numbers = numbers + torch.randint(choices, (*chosen.shape[:-1], 1), generator=draw)
        set_shadow(chosen, numbers % choices)

    def _count(self, storage: torch.UntypedStorage, name: str) -> None:
        key = storage_key(storage)
        if key in self.numbers:
            return
        self._last += 1  # keys come again, numbers do not
        self.numbers[key] = self._last
        weakref.finalize(storage, self._gone, key, self._last)
        self.ledger.add(self._last, storage.nbytes(), name)

    def _gone(self, key: int, number: int) -> None:
        if self.numbers.get(key) == number:
            del self.numbers[key]
        self.ledger.drop(number)


def is_collective(name: str) -> bool:
    """Return whether operator ``name`` is a collective."""
    local = "wait_tensor" in name or "_wrap_tensor" in name
    return name.startswith(COLLECTIVES) and not local


def _require_what_kernels_take(name: str, args: tuple) -> None:
    """Raise RuntimeError if the kernel of operator ``name`` would refuse ``args`` on CUDA."""
    if name in PRODUCTS:
        dtypes = [tensor.dtype for tensor in _tensors(args)]
        if len(set(dtypes)) > 1:
            raise RuntimeError(f"{name}: a product takes one dtype; it got {dtypes}")
    of_host = name in INDEXED and args[0].device.type == "cpu"
    if of_host and any(index.device.type == "cuda" for index in _tensors(args[1])):
        raise RuntimeError(f"{name}: a tensor of the host cannot be indexed by the device's")
    if name in JOINED:
        devices = [tensor.device for tensor in args[0]]
        if len(set(devices)) > 1:
            raise RuntimeError(f"{name}: the tensors must be on one device; they are on {devices}")


def _require_device_tensors(name: str, args: Any, kwargs: Any) -> None:
    if any(not isinstance(tensor, FakeTensor) for tensor in _tensors((args, kwargs))):
        raise RuntimeError(f"{name}: NCCL refuses tensors of the host")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
