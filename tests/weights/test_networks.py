"""Pushes over each network between real processes, also if some of them have died."""

import contextlib
import inspect

import pytest
import torch
import torchstore.api
from monarch.actor import ActorError
from torchstore.controller import Controller

from rl.weights import store
from rl.weights.packed import SLOTS
from rl.weights.rdma import FIRST_CHUNK, chunks_of
from rl.weights.routes import plan_blobs
from rl.weights.transport import TransferFailed
from tests.kit.tables import long
from tests.weights.network import RANKS, layouts
from tests.weights.ranks import (
    SHAPES,
    GeneratorRank,
    TrainerRank,
    call,
    check_a_killed_reader,
    check_pushes,
)


@contextlib.asynccontextmanager
async def opened(transport, spawn):
    """Keep a store open inside the block if the transport needs it."""
    if transport == "store":
        await store.open_store(spawn("store", 1))
    try:
        yield
    finally:
        if transport == "store":
            await store.close_store()


@pytest.mark.parametrize("transport", ["tcp", "collective", "rdma", long("store")])
async def test_every_version_arrives_bit_for_bit(procs, transport):
    async with procs() as spawn, opened(transport, spawn):
        trainer = spawn("trainer")
        generator = spawn("generator")
        await check_pushes(trainer, generator, transport, range(5))
        if transport == "store":  # as after a restart of the trainer; the store does not grow
            await check_pushes(trainer, generator, transport, range(4, 10))
            keys = await (await torchstore.client(store.STORE)).keys()
            blobs = sum(map(len, plan_blobs(*layouts(SHAPES))))
            # headers, blobs and deltas
            assert len(keys) <= RANKS + SLOTS * 2 * blobs


@pytest.mark.parametrize(
    ("transport", "failure"),
    [
        ("tcp", r"trainer rank [01] at .* cannot be reached"),
        ("collective", r"trainer rank [01] at .* cannot be reached"),
        long("rdma", "not found"),
        long("store", ""),
    ],
)
async def test_a_killed_reader_does_not_block_and_its_successor_fetches_whole_blobs(
    procs, transport, failure
):
    async with procs() as spawn, opened(transport, spawn):
        publishers, readers = await check_a_killed_reader(spawn, transport)
        if failure:  # a store keeps the values
            await call(publishers.close)
            with pytest.raises(ActorError, match=failure):
                await call(readers.pull, 5)


async def test_a_read_fails_after_its_timeout_and_can_be_repeated(procs):
    async with procs() as spawn:
        publishers = spawn("trainer").spawn("publishers", TrainerRank, "rdma", 60.0)
        readers = spawn("generator").spawn("readers", GeneratorRank, "rdma")
        await call(readers.connect, await call(publishers.open))
        await call(publishers.publish, 0)
        await call(readers.be_patient, 0.0)
        late = "fetch of version 0: .* MiB did not arrive within 0 s"
        with pytest.raises(ActorError, match=late) as error:
            await call(readers.pull, 0)
        assert isinstance(error.value.exception, TransferFailed)
        await call(readers.be_patient, 60.0)
        assert await call(readers.pull, 0) == [(True, 0)] * 2


@pytest.mark.parametrize("used", [1, FIRST_CHUNK, FIRST_CHUNK + 1, 700_001, 1_000_000])
def test_at_most_a_quarter_more_than_a_delta_is_read(used):
    area = torch.arange(1_000_000).to(torch.uint8)
    assert torch.equal(torch.cat(chunks_of(area)), area)
    read = torch.cat(chunks_of(area, used))
    assert used <= len(read) <= max(used * 1.25, used + FIRST_CHUNK)
    assert torch.equal(read, area[: len(read)])


def test_torchstore_is_changed_only_if_this_monarch_refuses_it():
    values = [getattr(Controller, name) for name in dir(Controller)]
    methods = [value._method for value in values if hasattr(value, "_method")]
    is_refused = len({*map(inspect.iscoroutinefunction, methods)}) > 1
    assert (torchstore.api.Controller is Controller) == (not is_refused)
