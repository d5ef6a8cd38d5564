"""Push through torchstore between real processes, and with a store that is opened again."""

import inspect

import pytest
import torchstore.api
from torchstore.controller import Controller

from rl.weights import store
from rl.weights.packed import SLOTS
from rl.weights.routes import plan_blobs
from tests.weights.network import RANKS, layouts
from tests.weights.ranks import SHAPES, check_a_killed_reader, check_pushes


@pytest.fixture
def with_store(with_procs):
    """Return a function that runs ``work(spawn)`` while a store is open."""

    def run(work):
        async def opened(spawn):
            await store.open_store(spawn("store", 1))
            try:
                await work(spawn)
            finally:
                await store.close_store()

        with_procs(opened)

    return run


def test_every_version_arrives_bit_for_bit_and_the_store_does_not_grow(with_store):
    async def work(spawn):
        trainer = spawn("trainer")
        generator = spawn("generator")
        await check_pushes(trainer, generator, "store", range(4))
        # as after a restart of the trainer
        await check_pushes(trainer, generator, "store", range(4, 10))
        keys = await (await torchstore.client(store.STORE)).keys()
        blobs = sum(map(len, plan_blobs(*layouts(SHAPES))))
        # headers, acknowledgements, blobs and deltas
        assert len(keys) <= RANKS * (1 + RANKS) + SLOTS * 2 * blobs

    with_store(work)


@pytest.mark.long
def test_a_killed_reader_does_not_block_and_its_successor_fetches_whole_blobs(with_store):
    async def work(spawn):
        await check_a_killed_reader(spawn, "store")

    with_store(work)


def test_torchstore_is_changed_only_if_this_monarch_refuses_it():
    methods = {
        name: value._method
        for name in dir(Controller)
        if hasattr(value := getattr(Controller, name), "_method")
    }
    kinds = {inspect.iscoroutinefunction(method) for method in methods.values()}
    assert (torchstore.api.Controller is Controller) == (len(kinds) == 1)
