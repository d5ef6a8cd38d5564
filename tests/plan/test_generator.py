"""The planned memory of a generator with the minimum KV cache is that of a real one."""

from dataclasses import replace

import pytest

from rl.generation.generator_config import GeneratorConfig, kv_bytes_at_least
from rl.model.shape import ModelConfig, shape_of
from rl.plan.memory import GIB, all_ranks, kv_sequences
from rl.plan.planned_run import PlannedRun
from tests.kit.generator_ranks import GeneratorRanks
from tests.kit.memory import held, repacked
from tests.plan.test_memory import SIZES, config_of

MODEL = ModelConfig(**SIZES, dim=512, n_layers=8, hidden_dim=1536, max_seq_len=300)
ENGINE = GeneratorConfig(block_size=64, max_batched_tokens=512, max_running_requests=8)


def test_a_generator_of_bitwise_parity_packs_no_weights():
    named = []
    config = config_of(MODEL)
    config.generator = replace(ENGINE, dtype="float32")  # not every host packs bfloat16
    for parity in ("close", "bitwise"):
        ranks = all_ranks(PlannedRun(replace(config, parity=parity)))
        named.append({item.name for rank in ranks for item in rank.items})
    assert named[0] - named[1] == {"packed weights"}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_generator_with_the_minimum_kv_cache_has_the_planned_memory(dtype):
    config = config_of(MODEL)
    config.generator = engine = replace(ENGINE, dtype=dtype)
    engine.kv_cache_gib = kv_bytes_at_least(engine, shape_of(MODEL), cuda=False) / GIB
    setting = PlannedRun(config)
    rank = next(rank for rank in all_ranks(setting) if rank.mesh == "generator-0")
    planned = {item.name: item.bytes for item in rank.items}
    ranks = GeneratorRanks(engine, MODEL)
    try:
        (sizes,) = ranks.run(held)
        (packed,) = ranks.run(repacked)
    finally:
        ranks.close()
    assert {name: planned[name] for name in sizes} == sizes
    assert packed == pytest.approx(planned.get("packed weights", 0), rel=0.02)
    assert kv_sequences(setting, MODEL.max_seq_len) == 1
