"""Placement of ranks on hosts and GPUs."""

import pytest

from rl.cli import find_config
from rl.config import RLConfig
from rl.errors import ConfigError
from rl.session.placement import Placement
from rl.types import Place
from rl.validation import validate


def config_of(*, dp: int, nodes: int, generators: int = 0, tp: int = 1) -> RLConfig:
    """``dp`` trainer ranks on ``nodes`` nodes, and ``generators`` nodes of generators of ``tp``
    ranks.
    """
    config = find_config("quickstart")()
    config.trainer.parallelism.data_parallel_shard_degree = dp
    config.trainer.nodes = nodes
    config.generator.nodes = generators
    config.generator.tensor_parallel_degree = tp
    return config


def test_meshes_of_one_host_take_gpus_in_order():
    config = config_of(dp=4, nodes=1, tp=2)
    config.algorithm.reward_kl_coef = 0.1  # a reference of one rank
    placement = Placement(config.session(), gpus=8)
    assert config.nodes == 1
    assert {
        name: (place.first_device, place.ranks) for name, place in placement.models.items()
    } == {
        "trainer": (0, 4),
        "reference": (4, 1),
    }
    assert placement.generator(0).first_device == 5
    assert placement.needed == 7


def test_ranks_go_to_nodes_in_order_and_generators_in_turns_to_those_after_them():
    config = config_of(dp=16, nodes=2, generators=2, tp=4)
    placement = Placement(config.session(), gpus=8)
    assert config.nodes == 4
    policy = placement.models["trainer"]
    assert policy == Place(hosts=2, ranks=16)
    assert policy.per_host == 8
    places = [placement.generator(number) for number in range(4)]
    assert [(place.first_host, place.hosts, place.first_device) for place in places] == [
        (2, 1, 0),
        (3, 1, 0),
        (2, 1, 4),
        (3, 1, 4),
    ]


def test_models_beside_the_policy_are_on_as_many_of_its_nodes_as_divide_their_ranks():
    config = config_of(dp=12, nodes=3)
    config.algorithm.reward_kl_coef = 0.1
    config.reference.parallelism.data_parallel_shard_degree = 3
    assert Placement(config.session(), gpus=8).models["reference"] == Place(
        hosts=3, ranks=3, first_device=4
    )
    config.reference.parallelism.data_parallel_shard_degree = 2
    assert Placement(config.session(), gpus=8).models["reference"] == Place(
        hosts=1, ranks=2, first_device=4
    )


def test_generators_without_nodes_of_their_own_are_dealt_to_the_trainers_behind_its_gpus():
    placement = Placement(config_of(dp=4, nodes=2, tp=2).session(), gpus=8)
    places = [placement.generator(number) for number in range(4)]
    assert [(place.first_host, place.first_device) for place in places] == [
        (0, 2),
        (1, 2),
        (0, 4),
        (1, 4),
    ]


def test_meshes_that_share_start_at_the_first_gpu():
    config = config_of(dp=4, nodes=1, tp=2)
    config.algorithm.reward_kl_coef = 0.1
    config.colocate = "models"
    placement = Placement(config.session(), gpus=8)
    assert {place.first_device for place in placement.models.values()} == {0}
    assert placement.generator(0).first_device == 4
    assert placement.needed == 6
    config.colocate = "all"
    assert Placement(config.session(), gpus=8).generator(0).first_device == 0
    assert Placement(config.session(), gpus=8).needed == 4


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"dp": 4, "nodes": 1, "tp": 2}, 10),
        ({"dp": 4, "nodes": 2, "tp": 2}, 6),
        ({"dp": 4, "nodes": 2, "generators": 1, "tp": 2}, 6),
        ({"dp": 4, "nodes": 2, "generators": 2, "tp": 2}, 4),
    ],
)
def test_a_config_that_needs_more_gpus_than_a_node_has_is_refused(fields, needed):
    config = config_of(**fields)
    config.generator.replicas = 3
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = needed
    validate(config)
    config.hardware.gpus_per_node = needed - 1
    with pytest.raises(ConfigError, match=f"need {needed} GPUs on a node, which has {needed - 1}"):
        validate(config)


@pytest.mark.parametrize(
    ("fields", "replicas"),
    [
        ({"dp": 4, "nodes": 1, "tp": 2}, 2),
        ({"dp": 4, "nodes": 2, "tp": 2}, 6),
        ({"dp": 4, "nodes": 1, "generators": 2, "tp": 3}, 4),
    ],
)
def test_generators_have_gpus_of_their_own_up_to_the_first_host_that_is_full(fields, replicas):
    config = config_of(**fields)
    placement = Placement(config.session(), gpus=8)
    assert placement.replicas == replicas
    places = [placement.generator(number) for number in range(replicas)]
    assert len({(place.first_host, place.first_device) for place in places}) == replicas
    behind = placement.generator(replicas)
    assert any(
        place.first_host == behind.first_host
        and behind.first_device < place.first_device + place.ranks
        for place in places
    )


def test_a_reference_on_one_host_leaves_fewer_generators():
    config = config_of(dp=4, nodes=2)
    config.algorithm.reward_kl_coef = 0.1  # a reference of one rank, on the first host
    placement = Placement(config.session(), gpus=4)
    assert placement.replicas == 2
