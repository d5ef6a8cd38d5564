"""Which role has which model, and whose turn it is on devices that several share."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from torchtitan.config import Configurable

from rl.actors.trainer import TrainerMesh
from rl.actors.worker import Outputs, WorkerGroup
from rl.controller.concurrency import background
from rl.errors import ActorFailure
from rl.observe.metrics import Metrics
from rl.types import Batch

Component = Literal["model", "optimizer"]


class Guest(Protocol):
    """What shares devices with models and is no worker group."""

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...


class Dispatch:
    """Calls on the worker groups of a run by their roles. ::

        dispatch = Dispatch({"policy": trainer, "reference": group}, shared=["policy", "reference"])
        await dispatch.start()
        outputs = await dispatch.forward("reference", batch, temperature=1.0)

    A group splits a batch among its ranks itself, and puts the answers together in the batch's
    order. Calls on roles with devices of their own overlap. Of ``shared`` roles one at a time has
    memory on the device: before a call the others go to host memory, and of the role's own comes
    back what the call needs.
    """

    def __init__(self, groups: Mapping[str, WorkerGroup], shared: Collection[str] = ()):
        self._groups = groups
        self._shared = frozenset(shared)
        self._guests: dict[str, Guest] = {}
        self._switching = asyncio.Lock()  # fair: who waits for another role is not overtaken
        self._idle = asyncio.Event()
        self._there: dict[str, set[Component]] = {}
        self._rates: dict[str, dict[str, float | None]] = {}
        self._changed: set[str] = set()  # whose weights are others than they started with
        self._callers = 0

    @property
    def policy(self) -> TrainerMesh:
        """The group whose weights are pushed."""
        return cast(TrainerMesh, self._groups["policy"])

    def has(self, role: str) -> bool:
        """Whether any group has this role."""
        return role in self._groups

    async def start(self) -> None:
        """Start every group that is not at work; those that share devices one after another."""
        lost = [role for role, group in self._groups.items() if not group.is_running]
        self._there = {role: parts for role, parts in self._there.items() if role not in lost}
        async with background() as work:
            for role in lost:
                work.create_task(self._start(role))

    async def _start(self, role: str) -> None:
        """Start a group anew, alone on the devices that it shares."""
        group = self._groups[role]
        self._changed.discard(role)
        if role not in self._shared:
            await group.stop()
            await group.start()
            return
        async with self._switching:
            await self._make_room()
            await group.stop()
            await group.start()
            self._there = {role: {"model", "optimizer"}}

    async def failed(self) -> ActorFailure:
        """How a group was lost, once one is."""
        watches = [asyncio.ensure_future(group.failed()) for group in self._groups.values()]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()

    async def forward(self, role: str, batch: Batch, *, temperature: float) -> Outputs:
        """What the model puts out for each token, float32 [T] in the batch's order."""
        async with self.resident(role, "model"):
            return await self._groups[role].forward(batch, temperature=temperature)

    async def forward_backward(
        self, role: str, batch: Batch, loss: Configurable.Config, *, temperature: float
    ) -> tuple[Outputs, Metrics]:
        """Add the gradient of ``loss`` on ``batch``; what ``forward`` returns, and metrics."""
        async with self.resident(role, "model", "optimizer"):
            return await self._groups[role].forward_backward(batch, loss, temperature=temperature)

    async def optim_step(self, role: str, **options: Any) -> Metrics:
        """Step on what was accumulated; options are those of WorkerGroup.optim_step."""
        self._changed.add(role)
        async with self.resident(role, "model", "optimizer"):
            return await self._groups[role].optim_step(**self._rates.get(role, {}), **options)

    def set_lr(self, role: str, lr: float | None) -> None:
        """Take ``lr`` for all further optimizer steps, in place of the schedule's; None for the
        schedule's again.
        """
        self._rates[role] = {"lr": lr}

    async def save_checkpoint(self, role: str, step: int, run_state: dict[str, Any]) -> None:
        """Write checkpoint ``step``, with ``run_state`` in it."""
        async with self.resident(role, "model", "optimizer"):
            await self._groups[role].save_checkpoint(step, run_state)

    async def init_model(self, role: str) -> None:
        """Give the model the weights that its config starts from; what was saved of it is
        deleted.
        """
        if role in self._changed:  # a model is made once in a process
            await self._start(role)
        async with self.resident(role, "model", "optimizer"):
            await self._groups[role].load_checkpoint(0)

    async def load_checkpoint(self, role: str, step: int = -1) -> tuple[dict[str, Any], list[str]]:
        """Load checkpoint ``step``, or the newest; where there is none, as for step 0, do as
        ``init_model``.

        Returns its state, empty where there is none, and names of incomplete ones.
        """
        if step == 0:
            await self.init_model(role)
            return {}, []
        async with self.resident(role, "model", "optimizer"):
            state, ignored = await self._groups[role].load_checkpoint(step)
        if step > 0 or state:
            self._changed.add(role)
        elif role in self._changed:
            await self.init_model(role)
        return state, ignored

    async def export_hf(self, role: str, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        async with self.resident(role, "model"):
            await self._groups[role].export_hf(folder)

    async def copy_weights(self, role: str, to: str, folder: Path) -> None:
        """Give ``to`` the parameters of ``role``, whatever the layouts, and keep them in
        ``folder``.
        """
        await self.save_weights(role, folder)
        await self.load_weights(to, folder)

    async def save_weights(self, role: str, folder: Path) -> None:
        """Keep the parameters of ``role`` in ``folder``, without what else a checkpoint has."""
        async with self.resident(role, "model"):
            await self._groups[role].save_weights(folder)

    async def load_weights(self, role: str, folder: Path, version: int | None = None) -> None:
        """Take parameters that ``save_weights`` has kept; they are of ``version``, if given."""
        self._changed.add(role)
        async with self.resident(role, "model"):
            await self._groups[role].load_weights(folder, version)

    def share(self, role: str, guest: Guest) -> None:
        """Have ``guest`` take its turn where ``role`` is one of those that share devices."""
        self._guests[role] = guest

    @asynccontextmanager
    async def resident(self, role: str, *parts: Component) -> AsyncIterator[None]:
        """``shards`` of ``role`` stay on its devices while the block runs.

        Not to be nested: others may wait.
        """
        if role not in self._shared:
            yield
            return
        async with self._switching:
            if role not in self._there:
                await self._make_room()
                self._there = {role: set()}
            missing = {*parts} - self._there[role]
            if missing:
                await self._bring_back(role, missing)
                self._there[role] |= missing
            self._callers += 1
        try:
            yield
        finally:
            self._callers -= 1
            self._idle.set()

    async def _bring_back(self, role: str, missing: set[Component]) -> None:
        if role in self._guests:
            await self._guests[role].onload()
        else:
            await self._groups[role].onload(
                model="model" in missing, optimizer="optimizer" in missing
            )

    async def _make_room(self) -> None:
        """Move what is there to host memory, once nobody uses it."""
        while self._callers:
            self._idle.clear()
            await self._idle.wait()
        for role, parts in self._there.items():
            if parts:
                await (self._guests.get(role) or self._groups[role]).offload()
        self._there = {}
