"""Nodes of a run, found by the files that their workers write."""

import asyncio
import json

import pytest

from rl.actors.hosts import Node, find_nodes, lost_node
from rl.errors import NodeLost
from rl.host.platform import host_memory
from rl.launch.node import memory_gib


@pytest.fixture(autouse=True)
def three_nodes(monkeypatch):
    monkeypatch.setenv("TILLER_NODES", "n1 n2 n3")


def comes_up(folder, name: str) -> Node:
    told = {"address": f"tcp://{name}:1", "pid": 7, "memory_gib": 8.0}
    (folder / f"{name}.json").write_text(json.dumps(told))
    return Node(name, f"tcp://{name}:1", 7)


@pytest.mark.parametrize(("given", "gib"), [("1024", 1.0), ("0", None), ("", None)])
def test_a_worker_says_how_much_memory_the_job_has_on_its_host(given, gib, monkeypatch):
    monkeypatch.setenv("SLURM_MEM_PER_NODE", given)
    assert memory_gib() == (gib or host_memory() / 2**30)


def test_gather_returns_the_first_nodes_in_order(tmp_path):
    third, first, second = (comes_up(tmp_path, name) for name in ("n3", "n1", "n2"))
    assert asyncio.run(find_nodes(tmp_path, 3, deadline=60)) == [first, second, third]
    assert asyncio.run(find_nodes(tmp_path, 2, deadline=60)) == [first, second]


def test_spare_node_replaces_a_missing_one(tmp_path):
    first, third = (comes_up(tmp_path, name) for name in ("n1", "n3"))
    assert asyncio.run(find_nodes(tmp_path, 2, deadline=0.5)) == [first, third]


def test_missing_nodes_are_named_at_the_deadline(tmp_path):
    comes_up(tmp_path, "n2")
    with pytest.raises(NodeLost, match="no worker came up within 0 s on n1, n3; "):
        asyncio.run(find_nodes(tmp_path, 2, deadline=0.3))


def test_gather_does_not_wait_for_nodes_that_have_ended(tmp_path):
    comes_up(tmp_path, "n1")
    comes_up(tmp_path, "n2")
    for name in ("n2", "n3"):
        (tmp_path / f"{name}.ended").write_text("ended with 1")
    with pytest.raises(
        NodeLost, match=r"no worker came up .* on n2 \(it ended with 1\), n3 \(it ended with 1\); "
    ):
        asyncio.run(find_nodes(tmp_path, 2, deadline=3600))


def test_ended_worker_of_the_run_is_a_lost_node(tmp_path):
    workers = [comes_up(tmp_path, name) for name in ("n1", "n2", "n3")]

    async def watch() -> None:
        watching = asyncio.create_task(lost_node(tmp_path, workers[:2]))
        (tmp_path / "n3.ended").write_text("ended with 1")
        await asyncio.sleep(0.5)
        assert not watching.done()
        (tmp_path / "n2.ended").write_text("was ended by SIGKILL")
        await asyncio.wait_for(watching, 30)

    with pytest.raises(NodeLost, match="node n2 is lost: its worker was ended by SIGKILL"):
        asyncio.run(watch())


def test_run_without_nodes_has_this_host(monkeypatch, tmp_path):
    monkeypatch.delenv("TILLER_NODES")
    assert asyncio.run(find_nodes(tmp_path, 1, deadline=0)) == []
