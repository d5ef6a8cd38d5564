"""Offloading of tensors to host memory, so that several models can share a device."""

from collections.abc import Iterable

import torch

from rl.compat.torch_internals import local_tensor
from rl.host.platform import release_cached_memory


class HostMemory:
    """Host memory of offloaded tensors. The tensors and their views stay the same objects:
    their storages are emptied, and ``bring_back`` fills them again.

    On CUDA the host memory is pinned and reused; Tiller's tests do not cover this.
    """

    def __init__(self, *, releases: bool = True) -> None:
        """``releases``: whether other processes can have the device memory meanwhile."""
        self._releases = releases
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._buffers: list[torch.Tensor] = []

    @property
    def holds(self) -> bool:
        """Whether any bytes are offloaded."""
        return bool(self._away)

    @torch.no_grad()
    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move the storages of ``tensors`` to host memory and free their device memory."""
        all_storages = (local_tensor(tensor).untyped_storage() for tensor in tensors)
        storages = list({s.data_ptr(): s for s in all_storages if s.nbytes()}.values())
        if [len(buffer) for buffer in self._buffers] != [s.nbytes() for s in storages]:
            self._buffers = [
                torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=s.device.type == "cuda")
                for s in storages
            ]
        self._away = list(zip(storages, self._buffers, strict=True))
        for storage, buffer in self._away:
            buffer.copy_(_bytes(storage), non_blocking=True)
        self._synchronize()
        for storage in storages:
            storage.resize_(0)
        if self._releases:
            release_cached_memory()

    @torch.no_grad()
    def bring_back(self) -> None:
        """Copy the bytes back into every storage."""
        for storage, buffer in self._away:
            storage.resize_(len(buffer))
            _bytes(storage).copy_(buffer, non_blocking=True)
        self._synchronize()
        self._away = []

    def _synchronize(self) -> None:
        if any(storage.device.type == "cuda" for storage, _ in self._away):
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
