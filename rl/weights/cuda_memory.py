"""CUDA memory for the push: pinned host memory, and GPU memory that other processes open.

No test runs this: it is written against the CUDA driver's documentation, for hosts with GPUs.
"""

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

import torch

_LAZY_PEER_ACCESS = 1


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Page-lock host memory if ``device`` is a GPU, which can then copy from and to it
    asynchronously.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):  # a thread begins on GPU 0, and each use costs memory there
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            )


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Undo ``pin``, before the memory is unmapped."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """GPU memory that any process of the host can open by this handle. The driver frees it when its
    owner ends.

    A process that opens it needs to see the owner's GPU, and peer access between the two GPUs.
    """

    handle: bytes
    bytes: int
    address: int
    """Address in the owner's process."""

    @classmethod
    def allocate(cls, bytes: int, device: torch.device) -> "DeviceMemory":
        """Allocate memory outside torch's allocator, where blocks share a handle."""
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            address = ctypes.c_uint64()
            handle = ctypes.create_string_buffer(64)
            _driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(bytes))
            _driver("cuIpcGetMemHandle", handle, address)
        return cls(handle.raw, bytes, address.value)

    def tensor(self, device: torch.device, *, own: bool) -> torch.Tensor:
        """Return the memory as uint8 [bytes], for use by ``device``; ``own`` in the owner's
        process.
        """
        address = ctypes.c_uint64(self.address)
        if not own:
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # makes the device's context current
                handle = _Handle.from_buffer_copy(self.handle)
                _driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
        data = (address.value, False)  # not read-only
        interface = {"shape": (self.bytes,), "typestr": "|u1", "data": data, "version": 3}
        memory = SimpleNamespace(__cuda_array_interface__=interface)
        return torch.as_tensor(memory)  # naming a device copies memory of another one

    def free(self) -> None:
        """Free the memory. The owner calls this when no reader copies any more."""
        _driver("cuMemFree_v2", ctypes.c_uint64(self.address))


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


def _driver(function: str, *args: object) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*args)
    if status:
        raise RuntimeError(f"{function} of the CUDA driver failed with status {status}")
