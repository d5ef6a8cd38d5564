"""The transport follows from the hosts of the ranks, and every rank gets one message about it."""

import pickle
import zlib
from unittest.mock import patch

import pytest
import torch

from rl.model.shards import Box, Region
from rl.weights import transport
from rl.weights.transport import Transfer, choose_transport

RANKS = 64
PARAMETERS = 300


@pytest.mark.parametrize(
    ("wish", "domains", "on_gpus", "has_rdma", "chosen"),
    [
        ("auto", ["a", "a", "a"], True, True, "shared_memory"),
        ("auto", ["a", "b", "a"], True, True, "collective"),
        ("auto", ["a", "b", "a"], False, True, "rdma"),
        ("auto", ["a", "b", "a"], False, False, "tcp"),
        ("torchstore", ["a", "a"], True, True, "torchstore"),
        ("shared_memory", ["a", "b"], True, False, "shared_memory"),
    ],
)
def test_one_host_uses_shared_memory_and_several_use_a_network(
    wish, domains, on_gpus, has_rdma, chosen
):
    assert choose_transport(wish, domains, on_gpus=on_gpus, has_rdma=has_rdma) == chosen


def layout(rank: int) -> tuple[Region, ...]:
    """Return the layout of a rank that has 1 / RANKS of each parameter."""
    return tuple(
        Region(f"layers.{number}.weight", (64 * RANKS, 4096), Box((64 * rank, 0), (64, 4096)))
        for number in range(PARAMETERS)
    )


def test_a_transfer_of_many_ranks_is_packed_once_and_small():
    transfer = Transfer("tcp", torch.bfloat16, tuple(map(layout, range(RANKS))), (layout(0),))
    with patch.object(transport.zlib, "compress", wraps=zlib.compress) as compress:
        messages = [pickle.dumps(transfer) for _ in range(10)]
    assert compress.call_count == 1
    assert max(map(len, messages)) < 100_000
    assert pickle.loads(messages[-1]) == transfer
