"""Moves tensors to host memory and back, so that several models can share a device."""

from collections.abc import Iterable

import torch

from rl.compat.torch_internals import local_tensor


class HostMemory:
    """Holds the bytes of tensors that are away. The tensors stay the same objects, and so do all
    views of them: their storages are emptied, and filled again by ``bring_back``.

    On CUDA the host memory is pinned and kept for the next time; no test of Tiller covers that.
    """

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._buffers: list[torch.Tensor] = []

    @property
    def holds(self) -> bool:
        """Whether any bytes are away from their device."""
        return bool(self._away)

    @torch.no_grad()
    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move the storages of ``tensors`` here; their devices have that memory back."""
        storages = list({s.data_ptr(): s for s in map(_storage, tensors) if s.nbytes()}.values())
        sizes = [storage.nbytes() for storage in storages]
        if [len(buffer) for buffer in self._buffers] != sizes:
            pinned = bool(storages) and storages[0].device.type == "cuda"
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes
            ]
        self._away = list(zip(storages, self._buffers, strict=True))
        for storage, buffer in self._away:
            buffer.copy_(_bytes(storage), non_blocking=True)
        self._synchronize()
        for storage in storages:
            storage.resize_(0)

    @torch.no_grad()
    def bring_back(self) -> None:
        """Give every storage its bytes again."""
        for storage, buffer in self._away:
            storage.resize_(len(buffer))
            _bytes(storage).copy_(buffer, non_blocking=True)
        self._synchronize()
        self._away = []

    def _synchronize(self) -> None:
        if any(storage.device.type == "cuda" for storage, _ in self._away):
            torch.cuda.synchronize()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return local_tensor(tensor).untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
