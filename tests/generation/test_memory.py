"""Ranks of a generator have the planned memory."""

from rl.plan.memory import all_ranks
from rl.plan.planned_run import PlannedRun
from tests.plan.generators import held
from tests.plan.test_memory import config_of

BLOCKS = {"KV cache": 2 * 2 * 32 * 2 * 32 * 4, "records of experts": 32 * 2 * 2}
"""Bytes of a block: keys and values of two layers, 32 tokens, two heads of 32 float32 numbers, and
two experts of each token in each layer."""


def test_parameters_and_kv_cache_have_the_planned_bytes(one_or_two_ranks):
    config = config_of(one_or_two_ranks.model)
    config.generator = one_or_two_ranks.config
    planned = [
        {item.name: item.bytes for item in rank.items}
        for rank in all_ranks(PlannedRun(config))
        if rank.mesh == "generator-0"
    ]
    found = one_or_two_ranks.run(held)
    for plan, sizes in zip(planned, found, strict=True):
        assert sizes["parameters"] == plan["parameters"]
        for name in BLOCKS.keys() & plan.keys():
            assert 0 <= plan[name] - sizes[name] < BLOCKS[name]
        assert plan.keys() >= sizes.keys()
