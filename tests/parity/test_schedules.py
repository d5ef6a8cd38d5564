"""Schedules of requests that try to make the bits of both sides differ, for all families."""

import numpy as np
import pytest
import torch

from rl.generation.generator_config import GeneratorConfig
from rl.model.families import BUILT_IN, family_named
from rl.model.shape import ModelConfig
from tests.kit.generator_ranks import GeneratorRanks
from tests.kit.ranks import on_ranks
from tests.kit.schedules import play, schedule
from tests.kit.tables import long
from tests.parity.sides import SIZES, batch_of, load, scored, weights_of

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "moe_hidden_dim": 40}
REFUSED = ("gemma2", "qwen3_5_moe_text", "qwen3_5_text")
"""Families without bitwise parity."""
FAMILIES = [name for name in BUILT_IN if name not in REFUSED]
OFTEN = {"gemma3_text": 3}
"""Number of schedules in the default tests. The long tests take 16 of each family."""
CONFIG = {"kv_cache_gib": 0.006, "max_batched_tokens": 256, "max_running_requests": 16}
CUT = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize(
    ("family", "rounds"),
    [*OFTEN.items(), *(long(one, 16) for one in FAMILIES)],
)
def test_no_schedule_changes_a_bit(family, rounds, tmp_path):
    experts = family_named(family).has_experts
    model = ModelConfig(**SIZES, family=family, **(EXPERTS if experts else {}))
    dtype = "bfloat16" if FAMILIES.index(family) % 2 else "float32"
    rng = np.random.default_rng(FAMILIES.index(family))
    policies = [weights_of(model, seed) for seed in range(2)]
    config = GeneratorConfig(dtype=dtype, threads=1, **CONFIG)
    ranks = GeneratorRanks(config, model, parity="bitwise")
    disturbed = np.zeros(2)
    calls = []
    try:
        for number in range(rounds):
            heat = float(rng.choice([1.0, 0.7, 1.3]))
            sampling = {"temperature": heat} | (CUT if number % 3 == 2 else {})
            plan = schedule(number, rng, SIZES["vocab_size"], (14, 18), **sampling)
            ranks.run(load, policies[0], 1)
            ((completions, *counts),) = ranks.run(play, plan, policies[1])
            disturbed += counts
            calls.append((batch_of(plan["asks"], completions), heat))
    finally:
        ranks.close()
    assert (disturbed > 0).all(), "tokens of shared prefixes, and preemptions"
    for version, weights in enumerate(policies, start=1):
        given = "alone", model, dtype, weights, str(tmp_path), calls, {}
        (results,) = on_ranks(1, scored, *given)
        compared = 0
        for mine, *sides, _ in results:
            own = (mine.loss_weights > 0) & (mine.columns["versions"] == version)
            sampled = mine.columns["behaviour_logprobs"][own]
            assert all(torch.equal(side[own], sampled) for side in sides)
            compared += int(own.sum())
        assert compared > 20 * rounds
