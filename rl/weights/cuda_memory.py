"""CUDA memory for the push: host memory that the GPU copies from, and GPU memory that another
process opens.

Not run by any test: written against the CUDA driver's documentation, for hosts with GPUs.
"""

import ctypes
from dataclasses import dataclass

import torch

_LAZY_PEER_ACCESS = 1


def pin(memory: torch.Tensor) -> None:
    """Page-lock host memory, where this host has CUDA; copies from and to it then run
    asynchronously.
    """
    if torch.cuda.is_available():
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        )


def unpin(memory: torch.Tensor) -> None:
    """Undo ``pin``, before the memory is unmapped."""
    if torch.cuda.is_available():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """GPU memory that any process of the host opens by this handle. The driver frees it with its
    owner.

    Opening it needs the owner's GPU to be visible to the process, and peer access between the two
    GPUs.
    """

    handle: bytes
    bytes: int
    address: int
    """Address in the owner's process."""

    @classmethod
    def allocate(cls, bytes: int, device: torch.device) -> "DeviceMemory":
        """Memory of its own, outside torch's allocator, whose blocks cannot be told apart by
        handle.
        """
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            address = ctypes.c_uint64()
            handle = ctypes.create_string_buffer(64)
            _driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(bytes))
            _driver("cuIpcGetMemHandle", handle, address)
        return cls(handle.raw, bytes, address.value)

    def tensor(self, *, own: bool) -> torch.Tensor:
        """The memory as uint8 [bytes], in the owner's process or in another."""
        address = ctypes.c_uint64(self.address)
        if not own:
            torch.cuda.current_stream().synchronize()
            _driver(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(self.handle),
                _LAZY_PEER_ACCESS,
            )
        return torch.as_tensor(_Exported(address.value, self.bytes), device="cuda")

    def free(self) -> None:
        """Give it back; for the owner, when no reader copies any more."""
        _driver("cuMemFree_v2", ctypes.c_uint64(self.address))


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _Exported:
    """Description from which torch makes a tensor of foreign GPU memory."""

    def __init__(self, address: int, bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _driver(function: str, *args: object) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), function)(*args)
    if status:
        raise RuntimeError(f"{function} of the CUDA driver failed with status {status}")
