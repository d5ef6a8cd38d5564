"""Turns of a generator on CUDA, with a stand-in for its memory pools. No test runs CUDA."""

import pytest

from rl.compat.vllm_internals import kv_caches
from rl.generation.generator_config import GeneratorConfig
from rl.model.shards import Box
from tests.generation.conftest import SMALL, policies
from tests.generation.pools import POOLS, pretend
from tests.generation.test_engine import addresses, asked
from tests.kit.generator_ranks import INTERPRETED, GeneratorRanks, generate, push
from tests.kit.policies import EXPERTS
from tests.kit.tables import long

TURN = [
    *("discard weights", "discard kv_cache", "copy runtime"),
    *("wake weights", "wake runtime", "wake kv_cache"),
]


@pytest.fixture(params=["V1", long("V2")], scope="module")
def pooled(request):
    """One rank in turns, whose model records experts, with either of vLLM's model runners."""
    more = INTERPRETED if request.param == "V2" else {}
    config = GeneratorConfig(**SMALL, max_running_requests=8, record_experts=True)
    ranks = GeneratorRanks(config, EXPERTS, prepare=pretend, **more)
    yield ranks
    ranks.close()


def test_a_generator_gives_up_its_pools_and_a_push_finds_the_addresses_again(pooled):
    weights = policies(EXPERTS)[0].weights
    pooled.run(push, weights, 0)
    before = pooled.run(generate, asked(max_tokens=20))
    for _ in range(2):
        (turn,) = pooled.run(leave_and_return, weights)
        assert turn == {"calls": TURN, "stays": True, "lost": True, "empty": True}
        assert pooled.run(generate, asked(max_tokens=20)) == before
    assert pooled.at_birth[0]["all_nan"]


def leave_and_return(engine, weights):
    """Give the memory to others and take it back; push to the tensors of before."""
    live = engine.parameters()
    caches = kv_caches(engine._engine)
    places = addresses(engine)
    begun = len(POOLS.calls)
    engine.offload()
    engine.onload()
    report = {
        "calls": POOLS.calls[begun:],
        "stays": addresses(engine) == places,
        "lost": engine.version is None and all(each.tensor.isnan().all() for each in live),
        "empty": not any(cache.any() for cache in caches),
    }
    for shard in live:
        shard.tensor.copy_(weights[shard.name][shard.box.slices_in(Box.whole(shard.shape))])
    engine.weights_changed(0)
    return report
