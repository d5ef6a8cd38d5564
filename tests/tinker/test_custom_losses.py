"""A custom loss has limits, and ends no process but its own."""

import functools
from unittest.mock import patch

import numpy as np
import pytest
import torch

from rl.tinker import custom_losses
from rl.tinker.custom_losses import CustomLosses, differentiate
from rl.tinker.errors import UserError
from rl.tinker.graph import Graph
from tests.tinker.bodies import answer_of
from tests.tinker.clients import Running
from tests.tinker.graphs import encoded


def overflowing(logprobs):
    least = torch.full_like(logprobs, -(2**53), dtype=torch.int64) * 1024
    quotient = torch.div(least, torch.full_like(least, -1), rounding_mode="trunc")
    return logprobs.sum() + quotient.sum(), {}


def plain(logprobs):
    return (logprobs.exp() * logprobs).sum(), {"custom/mean:mean": logprobs.mean()}


def graph_of(call, *ranks) -> Graph:
    return Graph.of(**encoded(call, *ranks))


@pytest.fixture
def losses():
    found = CustomLosses()
    yield found
    found.close()


async def test_a_loss_that_ends_its_process_is_an_error_of_the_client(losses):
    datums = [(np.linspace(-3, 0, 7, dtype=np.float32), {})] * 3
    found, metrics = await losses.differentiate(graph_of(plain), datums)
    losses._process.kill()
    losses._process.is_alive = lambda: True  # it dies during the next loss
    with pytest.raises(UserError, match=r"the loss ended its process \(Killed\)"):
        await losses.differentiate(graph_of(plain), datums)
    del losses._process.is_alive
    assert (await losses.differentiate(graph_of(plain), datums))[1] == metrics
    wanted, own = differentiate(graph_of(plain), datums)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted]
    assert metrics == own


async def test_a_loss_without_an_end_and_one_without_memory_are_ended(losses):
    def long(logprobs):
        found = logprobs
        for _ in range(400):
            found = found.tanh()  # whose gradient stays finite
        return found.sum(), {}

    def large(logprobs):
        wide = (logprobs[:, None] * logprobs).double()
        return sum([wide.exp() for _ in range(9)]).sum(), {}

    short = [(np.zeros(3, np.float32), {})]
    await losses.differentiate(graph_of(plain), short)
    many = [(np.zeros(10**5, np.float32), {})] * 99
    with patch.object(custom_losses, "LIMIT_S", 0.2), pytest.raises(UserError, match="than 0.2 s"):
        await losses.differentiate(graph_of(long), many)
    losses.close()
    with patch.object(custom_losses, "MEMORY", 2**28), pytest.raises(UserError, match="allocate"):
        await losses.differentiate(graph_of(large), [(np.zeros(2500, np.float32), {})])
    assert await losses.differentiate(graph_of(plain), short)


async def test_a_server_goes_on_after_a_loss_that_overflows(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        body = {"session_id": client.session, "custom_loss_seq_id": 1, **encoded(overflowing)}
        made = await running.result(await running.ask("create_custom_loss", body))
        backward = functools.partial(client.backward, loss="custom", loss_id=made["loss_id"])
        found = await client.done(await backward(1, 2))
        assert found["category"] == "user" and "an integer is divided" in found["error"], found
        assert answer_of(await client.done(await client.backward(1, 2)))[1]
    assert not running.server.parts.custom_losses._process.is_alive()
