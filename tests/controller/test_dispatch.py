"""Models that share devices: whoever is called is there, alone, and nobody waits for ever."""

import ast
import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.controller.dispatch import Dispatch

ROLES = ("policy", "reference", "critic")
NEEDS = {
    "forward": {"model"},
    "forward_backward": {"model", "optimizer"},
    "optim_step": {"model", "optimizer"},
}


class Device:
    """Room for one."""

    def __init__(self):
        self.holds: dict[str, set[str]] = {}
        self.moves = 0


class Group:
    """Knows what of it is on the device, and complains where it is called without."""

    def __init__(self, name: str, device: Device, pauses: list[int]):
        self.name = name
        self.device = device
        self._pauses = pauses
        self.is_running = False
        self.calls = 0
        self.starts = 0
        self.weights = ""
        self.saved = False

    @property
    def here(self) -> set[str]:
        return self.device.holds.setdefault(self.name, set())

    async def start(self):
        assert not any(self.device.holds.values()), f"{self.name} starts beside another"
        await asyncio.sleep(0)
        self.here.update({"model", "optimizer"})
        self.is_running = True
        self.starts = self.starts + 1

    async def stop(self):
        self.here.clear()
        self.is_running = False

    async def offload(self):
        assert not self.calls, f"{self.name} leaves in the middle of a call"
        await asyncio.sleep(0)
        self.device.moves += 1
        self.here.clear()

    async def onload(self, *, model: bool, optimizer: bool):
        assert not any(parts for name, parts in self.device.holds.items() if name != self.name), (
            "no room"
        )
        await asyncio.sleep(0)
        self.device.moves += 1
        self.here.update(["model"] * model + ["optimizer"] * optimizer)

    async def forward(self, batch, **_):
        return await self._call("forward")

    async def forward_backward(self, batch, loss, **_):
        return await self._call("forward_backward")

    async def load_checkpoint(self, step):
        self.weights = "first" if step < 1 and not self.saved else "saved"
        return ({"step": 7} if step == -1 and self.saved else {}), []

    async def optim_step(self, **options):
        self.options = options
        self.weights = "trained"
        return await self._call("optim_step")

    async def _call(self, name: str):
        self.calls += 1
        for _ in range(1 + (self._pauses.pop() if self._pauses else 0)):
            assert self.here >= NEEDS[name], f"{name} of {self.name} without all that it needs"
            await asyncio.sleep(0)
        self.calls -= 1
        return self.name


def dispatch_of(device: Device, pauses: list[int], shared=ROLES) -> Dispatch:
    return Dispatch(
        {role: Group(role, device if role in shared else Device(), pauses) for role in ROLES},
        shared,
    )


async def call(dispatch: Dispatch, role: str, name: str):
    arguments = {"forward": (None,), "forward_backward": (None, None), "optim_step": ()}[name]
    options = {} if name == "optim_step" else {"temperature": 1.0}
    return await getattr(dispatch, name)(role, *arguments, **options)


CALLS = st.tuples(st.sampled_from(ROLES), st.sampled_from(list(NEEDS)))


@settings(max_examples=200, deadline=None)
@given(
    rounds=st.lists(st.lists(CALLS, max_size=6), max_size=6),
    pauses=st.lists(st.integers(0, 4), max_size=20),
)
def test_whatever_is_called_side_by_side_one_at_a_time_is_there_with_all_it_needs(rounds, pauses):
    device = Device()

    async def run():
        dispatch = dispatch_of(device, pauses)
        await dispatch.start()
        for together in rounds:
            answers = await asyncio.gather(*(call(dispatch, *each) for each in together))
            assert answers == [role for role, _ in together]
            assert sum(bool(parts) for parts in device.holds.values()) <= 1

    asyncio.run(asyncio.wait_for(run(), 10))


def test_what_a_call_does_not_need_stays_away():
    device = Device()

    async def run():
        dispatch = dispatch_of(device, [])
        await dispatch.start()
        await call(dispatch, "policy", "forward")
        assert device.holds["policy"] == {"model"}
        await call(dispatch, "policy", "optim_step")
        assert device.holds["policy"] == {"model", "optimizer"}
        moves = device.moves
        await call(dispatch, "policy", "forward")
        assert device.moves == moves

    asyncio.run(asyncio.wait_for(run(), 10))


def test_who_waits_for_another_role_is_not_overtaken_for_ever():
    async def run():
        dispatch = dispatch_of(Device(), [5] * 100)
        await dispatch.start()
        order = []

        async def noted(role):
            await call(dispatch, role, "forward")
            order.append(role)

        await asyncio.gather(noted("policy"), noted("policy"), noted("reference"), noted("policy"))
        assert order == ["policy", "policy", "reference", "policy"]

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize("shared", [(), ("reference", "critic")])
def test_calls_on_devices_of_their_own_overlap(shared):
    """Each ends only when the other has begun."""
    begun: set[str] = set()

    async def run():
        dispatch = Dispatch({role: Group(role, Device(), []) for role in ROLES}, shared)
        await dispatch.start()

        async def meet(role, other):
            async with dispatch.resident(role, "model"):
                begun.add(role)
                while other not in begun:
                    await asyncio.sleep(0)

        await asyncio.gather(meet("policy", "reference"), meet("reference", "policy"))

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_group_that_was_lost_is_started_with_room_made_for_it():
    device = Device()

    async def run():
        dispatch = dispatch_of(device, [])
        await dispatch.start()
        await call(dispatch, "policy", "forward")
        lost = dispatch._groups["policy"]
        await lost.stop()
        await dispatch.start()
        assert lost.is_running
        assert await call(dispatch, "reference", "forward") == "reference"

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_learning_rate_stays_until_the_schedules_is_wanted_again():
    async def run():
        dispatch = dispatch_of(Device(), [], shared=())
        await dispatch.start()
        dispatch.set_lr("policy", 1e-3)
        for role in ("policy", "critic"):
            await dispatch.optim_step(role, denominator=2.0)
        given = [dispatch._groups[role].options for role in ("policy", "critic")]
        assert given == [{"lr": 1e-3, "denominator": 2.0}, {"denominator": 2.0}]
        dispatch.set_lr("policy", None)
        await dispatch.optim_step("policy")
        assert dispatch._groups["policy"].options == {"lr": None}

    asyncio.run(asyncio.wait_for(run(), 10))


def test_the_controller_knows_nothing_of_ranks_micro_batches_or_devices():
    """The line between what is learned and how: no such word in its code, and no engine among its
    imports.
    """
    names = {
        "rank",
        "ranks",
        "dp",
        "dp_degree",
        "dp_rank",
        "micro_batch",
        "micro_batches",
        "device",
        "cuda",
        "shard",
    }
    for file in sorted(Path("rl/controller").glob("*.py")):
        tree = ast.parse(file.read_text())
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert not used & names, f"{file}: {used & names}"
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(
            (module or "").startswith(("rl.training", "rl.generation", "vllm"))
            for module in imported
        ), file


@pytest.mark.parametrize("shared", [(), ROLES])
def test_a_model_goes_back_to_what_it_began_as_by_a_new_start_where_it_has_changed(shared):
    async def run():
        dispatch = dispatch_of(Device(), [], shared)
        await dispatch.start()
        policy = dispatch._groups["policy"]
        await dispatch.load_checkpoint("policy")
        await dispatch.init_model("policy")
        assert policy.starts == 1
        await dispatch.optim_step("policy")
        assert (await dispatch.load_checkpoint("policy"))[
            0
        ] == {}  # none was saved before it was given up
        assert (policy.starts, policy.weights) == (2, "first")
        policy.saved = True
        await dispatch.optim_step("policy")
        assert (await dispatch.load_checkpoint("policy"))[0] == {"step": 7}
        assert policy.starts == 2
        await dispatch.init_model("policy")
        assert policy.starts == 3

    asyncio.run(asyncio.wait_for(run(), 10))
