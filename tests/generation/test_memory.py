"""Ranks of a generator have the planned memory."""

from rl.generation.generator_config import BankConfig, GeneratorConfig
from rl.model.shape import shape_of
from rl.model.tp_plan import generator_layout
from rl.plan.memory import all_ranks
from rl.plan.planned_run import PlannedRun
from rl.validation.layouts import bank_bytes
from tests.generation.conftest import SMALL
from tests.kit.generator_ranks import GeneratorRanks
from tests.kit.memory import held
from tests.kit.policies import UNTIED_SPLIT
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


def adapters_of(engine) -> int:
    """Return the bytes of the adapters of a rank."""
    buffers = engine._model.titan.named_buffers()
    return sum(each.nbytes for name, each in buffers if ".adapters_" in name)


def test_adapters_have_the_bytes_that_the_check_of_a_config_counts():
    bank = BankConfig(3, 4, ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "lm_head"))
    ranks = GeneratorRanks(GeneratorConfig(**SMALL), UNTIED_SPLIT, adapters=bank)
    layout, *_ = generator_layout(shape_of(UNTIED_SPLIT), fuse_qkv=False, tp=1)
    assert ranks.run(adapters_of) == [bank_bytes(ranks.config, bank, layout)]
    ranks.close()
