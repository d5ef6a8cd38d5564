"""Placement of ranks on hosts and GPUs."""

import pytest

from rl.cli.arguments import find_config
from rl.config import RLConfig
from rl.errors import ConfigError
from rl.plan.memory import READER_CONTEXT, all_ranks
from rl.plan.planned_run import PlannedRun
from rl.session.placement import Placement
from rl.types import Place
from rl.validation import validate


def config_of(
    *, dp: int, nodes: int = 1, generators: int = 0, tp: int = 1, reference: int = 0
) -> RLConfig:
    """``dp`` trainer ranks on ``nodes`` nodes, ``generators`` nodes of generators of ``tp`` ranks,
    and a reference of ``reference`` ranks.
    """
    config = find_config("quickstart")()
    config.trainer.parallelism.data_parallel_shard_degree = dp
    config.trainer.nodes = nodes
    config.generator.nodes = generators
    config.generator.tensor_parallel_degree = tp
    if reference:
        config.algorithm.reward_kl_coef = 0.1
        config.reference.parallelism.data_parallel_shard_degree = reference
    return config


def placed(config: RLConfig, gpus: int = 8) -> Placement:
    return Placement(config.session(), gpus=gpus)


def generators(placement: Placement, count: int) -> list[tuple[int, int]]:
    """Return the host and the first GPU of each generator."""
    places = [placement.generator(number) for number in range(count)]
    assert {place.hosts for place in places} == {1}
    return [(place.first_host, place.first_device) for place in places]


def test_ranks_go_to_nodes_in_order_and_generators_in_turns_to_those_after_them():
    config = config_of(dp=4, tp=2, reference=1)
    placement = placed(config)
    assert config.nodes == 1
    assert placement.models == {
        "trainer": Place(ranks=4),
        "reference": Place(ranks=1, first_device=4),
    }
    assert generators(placement, 1) == [(0, 5)]
    assert placement.needed == 7
    config = config_of(dp=16, nodes=2, generators=2, tp=4)
    placement = placed(config)
    assert config.nodes == 4
    assert placement.models["trainer"] == Place(hosts=2, ranks=16)
    assert placement.models["trainer"].per_host == 8
    assert generators(placement, 4) == [(2, 0), (3, 0), (2, 4), (3, 4)]
    # without nodes of their own, behind the trainer's GPUs
    placement = placed(config_of(dp=4, nodes=2, tp=2))
    assert generators(placement, 4) == [(0, 2), (1, 2), (0, 4), (1, 4)]


@pytest.mark.parametrize(("ranks", "hosts"), [(3, 3), (2, 1)])
def test_models_beside_the_policy_are_on_as_many_of_its_nodes_as_divide_their_ranks(ranks, hosts):
    placement = placed(config_of(dp=12, nodes=3, reference=ranks))
    assert placement.models["reference"] == Place(hosts=hosts, ranks=ranks, first_device=4)


def test_meshes_that_share_start_at_the_first_gpu():
    config = config_of(dp=4, tp=2, reference=1)
    for config.colocate, first, needed in (("models", 4, 6), ("all", 0, 4)):
        placement = placed(config)
        assert {place.first_device for place in placement.models.values()} == {0}
        assert generators(placement, 1) == [(0, first)]
        assert placement.needed == needed


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"dp": 4, "tp": 2}, 10),
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
    ("fields", "gpus", "replicas"),
    [
        ({"dp": 4, "tp": 2}, 8, 2),
        ({"dp": 4, "nodes": 2, "tp": 2}, 8, 6),
        ({"dp": 4, "generators": 2, "tp": 3}, 8, 4),
        ({"dp": 4, "nodes": 2, "reference": 1}, 4, 2),  # the reference is on the first host
    ],
)
def test_generators_have_gpus_of_their_own_up_to_the_first_host_that_is_full(
    fields, gpus, replicas
):
    placement = placed(config_of(**fields), gpus)
    assert placement.replicas == replicas
    *own, (host, device) = generators(placement, replicas + 1)
    assert len({*own}) == replicas
    ranks = fields.get("tp", 1)
    assert any(host == other and device < first + ranks for other, first in own)


@pytest.mark.parametrize(
    ("transport", "colocate", "foreign", "readers"),
    [
        ("cuda_ipc", "none", {0, 1, 2, 3}, [4, 4, 4, 4]),
        ("cuda_ipc", "all", {0, 1, 2, 3}, [3, 3, 3, 3]),
        ("shared_memory", "none", set(), [0, 0, 0, 0]),
    ],
)
def test_a_generator_sees_its_own_gpus_first_and_then_those_whose_memory_it_opens(
    transport, colocate, foreign, readers
):
    """Local ranks are numbers of GPUs, and the plan counts the context of each reader."""
    config = config_of(dp=4, tp=2)
    config.generator.replicas = 2
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = 8
    config.weights.transport = transport
    config.colocate = colocate
    if colocate == "all":
        config.rollout.max_staleness = 0
    validate(config)
    placement = placed(config)
    for place in map(placement.generator, range(2)):
        assert place.visible[: place.ranks] == place.devices
        assert sorted(place.visible) == sorted({*place.devices} | foreign)
    assert placement.models["trainer"].visible == (0, 1, 2, 3)
    ranks = [rank for rank in all_ranks(PlannedRun(config)) if rank.mesh == "trainer"]
    found = [sum(item.bytes for item in rank.named("contexts of readers")) for rank in ranks]
    assert found == [count * READER_CONTEXT for count in readers]
