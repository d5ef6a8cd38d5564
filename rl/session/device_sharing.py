"""DeviceSharing: which model has memory on devices that several models share."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

from rl.session.concurrency import Signal

Component = Literal["model", "optimizer"]


class Offloadable(Protocol):
    """A model whose memory on a device can move to the host and back, or all generators."""

    async def offload(self) -> None: ...

    async def onload(self, *, model: bool, optimizer: bool) -> Any: ...


class DeviceSharing:
    """Gives the devices that ``shared`` roles have in common to one role at a time. ::

        devices = DeviceSharing(shared=["trainer", "reference"])
        devices.add("trainer", trainer)
        async with devices.of("trainer", "model"):
            ...     # the trainer's parameters are on the device, nothing of the reference is

    - Before the block, other roles move to host memory, and missing components come back. Without
      components, a role has only the memory of its parameters, which the block overwrites.
    - Blocks of one role overlap. Roles get the devices in the order in which they asked.
    - Roles that are not shared do not wait.
    - Blocks must not be nested: the inner one would wait for a role that waits for the outer one.
    """

    def __init__(self, shared: Collection[str] = ()):
        self._shared = frozenset(shared)
        self._models: dict[str, Offloadable] = {}
        self._resident: dict[str, set[Component]] = {}
        self._switching = asyncio.Lock()  # fair
        self._users = 0
        self._changed = Signal()

    def add(self, role: str, model: Offloadable) -> None:
        """Move ``model`` when ``role`` or another role needs the devices."""
        self._models[role] = model

    def forget(self, role: str) -> None:
        """Note that nothing of ``role`` is on a device, since its processes have ended."""
        self._resident.pop(role, None)

    @asynccontextmanager
    async def of(self, role: str, *components: Component) -> AsyncIterator[None]:
        """Keep ``components`` of ``role`` on its devices while the block runs."""
        if role not in self._shared:
            yield
            return
        async with self._switching:
            enters = role not in self._resident
            if enters:
                await self._offload_resident()
                self._resident = {role: set()}
            if (missing := {*components} - self._resident[role]) or enters:
                parts = {"model": "model" in missing, "optimizer": "optimizer" in missing}
                await self._models[role].onload(**parts)
                self._resident[role] |= missing
            self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._changed.notify()

    def share(self, *roles: str) -> bool:
        """Return whether these roles take turns on the same devices."""
        return self._shared.issuperset(roles)

    @asynccontextmanager
    async def starting(self, role: str) -> AsyncIterator[None]:
        """Keep other roles off the devices of ``role`` while the block restarts it."""
        if role not in self._shared:
            yield
            return
        async with self._switching:
            await self._offload_resident()
            yield
            self._resident = {role: {"model", "optimizer"}}

    async def _offload_resident(self) -> None:
        """Move the resident role to host memory, once it is not in use."""
        await self._changed.until(lambda: not self._users)
        for role in self._resident:
            await self._models[role].offload()
        self._resident = {}
