"""The transport follows from the hosts of the ranks, unless the config names one."""

import pytest

from rl.platform import memory_domain
from rl.weights import shared_memory
from rl.weights.transport import choose_transport


@pytest.mark.parametrize(
    ("wish", "domains", "has_rdma", "transport"),
    [
        ("auto", ["a", "a", "a"], True, "shared_memory"),
        ("auto", ["a", "b", "a"], True, "rdma"),
        ("auto", ["a", "b", "a"], False, "tcp"),
        ("torchstore", ["a", "a"], True, "torchstore"),
        ("shared_memory", ["a", "b"], False, "shared_memory"),
    ],
)
def test_one_host_uses_shared_memory_and_several_use_a_network(wish, domains, has_rdma, transport):
    assert choose_transport(wish, domains, has_rdma=has_rdma) == transport


def test_shared_memory_of_another_host_is_refused_with_the_fix(monkeypatch):
    from tests.weights.test_shared_memory import (
        SHAPE,
        SharedMemoryPublisher,
        SharedMemorySubscriber,
        rows,
        torch,
    )

    publisher = SharedMemoryPublisher([rows(torch.zeros(SHAPE), 0, 6)], torch.float32)
    monkeypatch.setattr(shared_memory, "memory_domain", lambda: "elsewhere")
    with pytest.raises(
        RuntimeError,
        match=rf"{memory_domain()}.*'elsewhere|elsewhere.*set weights.transport to 'rdma'",
    ):
        SharedMemorySubscriber([publisher.address], [rows(torch.zeros(SHAPE), 0, 6)], reader=0)
    publisher.close()
