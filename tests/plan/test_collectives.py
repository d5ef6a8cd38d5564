"""A plan counts the time of collectives at the rate of the links between their ranks."""

import pytest

from rl.plan.collectives import Group
from rl.session.hardware import DEVICES
from rl.types import Place
from tests.plan.programs import planned

GB = 10**9
NODES = Place(hosts=2, ranks=16)
DEVICE = DEVICES["h100"]
MIXTURE = ("--config", "qwen3_30b_a3b", "--model.n_layers", "2")
DENSE = ("--config", "qwen3_14b_4_nodes", "--model.n_layers", "2")
EXPERTS = "--trainer.parallelism.expert_parallel_degree"


@pytest.mark.parametrize(
    ("kind", "group", "seconds"),
    [
        # within a node, at 450 GB/s
        ("all-gather", Group(8, 1), 7 / 8 * 90 / 450),
        ("all-reduce", Group(8, 1), 2 * 7 / 8 * 90 / 450),
        ("all-to-all", Group(8, 1), 7 / 8 * 90 / 450),
        # between two nodes, with eight adapters of 50 GB/s on each
        ("all-gather", Group(16, 1), 15 / 16 * 90 / 400),
        ("reduce-scatter", Group(2, 8), 1 / 2 * 90 / 50),
        ("all-to-all", Group(16, 1), 8 / 16 * 90 / 50),
    ],
)
def test_a_collective_takes_the_time_of_its_slowest_link(kind, group, seconds):
    assert group.seconds(kind, 90 * GB, NODES, DEVICE) == pytest.approx(seconds)


def test_experts_on_two_nodes_are_waited_for_longer(capsys):
    within, across = (
        planned(capsys, *MIXTURE, EXPERTS, degree)[1]["step"] for degree in ("8", "16")
    )
    (moved,) = (each for each in within["collectives"] if each["axis"] == "EP")
    # six times 8 experts of 2,048 bfloat16 numbers for each of 16,384 tokens in 2 layers
    assert moved["bytes"] == 6 * 2 * 16_384 * 8 * 2048 * 2
    assert 0 < within["waiting"] < across["waiting"]
    assert across["training"] - across["waiting"] == pytest.approx(
        within["training"] - within["waiting"]
    )


def test_fsdp_is_waited_for_only_if_it_takes_longer_than_the_computation(capsys):
    usual, slow = (
        planned(capsys, *DENSE, *arguments)[1]["step"]
        for arguments in ([], ["--hardware.network_gb_s", "0.5"])
    )
    assert usual["waiting"] == 0
    assert slow["waiting"] > 0
    assert slow["training"] == pytest.approx(usual["training"] + slow["waiting"])
