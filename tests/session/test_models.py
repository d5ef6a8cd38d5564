"""Models that share devices: a called model is alone on them, and every call ends."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.algorithms.losses import dapo, grpo
from rl.errors import RunError
from rl.session.models import Models
from rl.types import Batch

ROLES = ("trainer", "reference", "critic")
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
    """Asserts that the components that a call needs are on the device."""

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


def models_of(device: Device, pauses: list[int], shared=ROLES) -> Models:
    return Models(
        {role: Group(role, device if role in shared else Device(), pauses) for role in ROLES},
        shared,
    )


async def call(models: Models, role: str, name: str):
    batch = SimpleNamespace(reduction=None)
    arguments = {"forward": (None,), "forward_backward": (batch, None), "optim_step": ()}[name]
    options = {} if name == "optim_step" else {"temperature": 1.0}
    return await getattr(models, name)(*arguments, role=role, **options)


CALLS = st.tuples(st.sampled_from(ROLES), st.sampled_from(list(NEEDS)))


@settings(max_examples=200)
@given(
    rounds=st.lists(st.lists(CALLS, max_size=6), max_size=6),
    pauses=st.lists(st.integers(0, 4), max_size=20),
)
def test_concurrent_calls_get_the_device_one_role_at_a_time(rounds, pauses):
    async def play():
        device = Device()
        models = models_of(device, pauses)
        await models.start_models()
        for together in rounds:
            answers = await asyncio.gather(*(call(models, *each) for each in together))
            assert answers == [role for role, _ in together]
            assert sum(bool(parts) for parts in device.holds.values()) <= 1

    asyncio.run(play())


async def test_components_that_a_call_does_not_need_stay_in_host_memory():
    device = Device()
    models = models_of(device, [])
    await models.start_models()
    await call(models, "trainer", "forward")
    assert device.holds["trainer"] == {"model"}
    await call(models, "trainer", "optim_step")
    assert device.holds["trainer"] == {"model", "optimizer"}
    moves = device.moves
    await call(models, "trainer", "forward")
    assert device.moves == moves


async def test_residency_is_fair():
    models = models_of(Device(), [5] * 100)
    await models.start_models()
    order = []

    async def noted(role):
        await call(models, role, "forward")
        order.append(role)

    await asyncio.gather(noted("trainer"), noted("trainer"), noted("reference"), noted("trainer"))
    assert order == ["trainer", "trainer", "reference", "trainer"]


@pytest.mark.parametrize("shared", [(), ("reference", "critic")])
async def test_calls_on_separate_devices_overlap(shared):
    """Each call ends only after the other has begun."""
    begun: set[str] = set()
    models = Models({role: Group(role, Device(), []) for role in ROLES}, shared)
    await models.start_models()

    async def meet(role, other):
        async with models._devices.of(role, "model"):
            begun.add(role)
            while other not in begun:
                await asyncio.sleep(0)

    await asyncio.gather(meet("trainer", "reference"), meet("reference", "trainer"))


async def test_lost_group_is_restarted_alone_on_the_device():
    device = Device()
    models = models_of(device, [])
    await models.start_models()
    await call(models, "trainer", "forward")
    lost = models._groups["trainer"]
    await lost.stop()
    await models.start_models()
    assert lost.is_running
    assert await call(models, "reference", "forward") == "reference"


@pytest.mark.parametrize("shared", [(), ROLES])
async def test_changed_model_is_restarted_to_get_its_first_weights(shared):
    models = models_of(Device(), [], shared)
    await models.start_models()
    policy = models._groups["trainer"]
    await models.load()
    await models.init_model("trainer")
    assert policy.starts == 1
    await models.optim_step()
    state, _ = await models.load()
    assert state == {}  # none was saved before it was given up
    assert (policy.starts, policy.weights) == (2, "first")
    policy.saved = True
    await models.optim_step()
    assert (await models.load())[0] == {"step": 7}
    assert policy.starts == 2
    await models.init_model("trainer")
    assert policy.starts == 3


@pytest.mark.parametrize(
    ("loss", "weights"), [(grpo(), [0.0, 0.5, 0.5, 0.0, 1.0]), (dapo(), [0.0, 1.0, 1.0, 0.0, 1.0])]
)
def test_forward_backward_applies_the_reduction_of_the_loss(loss, weights):
    group = Group("trainer", Device(), [])
    given = []

    async def keep(batch, *_, **__):
        given.append(batch)

    group.forward_backward = keep
    batch = Batch(
        tokens=torch.zeros(5).long(),
        lengths=torch.tensor([3, 2]),
        loss_weights=torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]),
    )
    asyncio.run(Models({"trainer": group}).forward_backward(batch, loss))
    assert [each.loss_weights.tolist() for each in given] == [weights]


async def test_a_step_on_batches_with_different_reductions_needs_a_denominator():
    group = Group("trainer", Device(), [])
    models = Models({"trainer": group})
    batch = Batch(
        tokens=torch.zeros(2).long(),
        lengths=torch.tensor([2]),
        loss_weights=torch.tensor([0.0, 1.0]),
    )

    await models.start_models()
    for loss in (grpo(), dapo()):
        await models.forward_backward(batch, loss)
        await models.optim_step()
    for loss in (grpo(), dapo()):
        await models.forward_backward(batch, loss)
    with pytest.raises(RunError, match="the reductions sequence_mean and token_mean, whose"):
        await models.optim_step()
    await models.optim_step(denominator=2.0)
    await models.forward_backward(batch, grpo())
    await models.optim_step()
