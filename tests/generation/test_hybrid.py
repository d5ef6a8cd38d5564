"""C2 and C3 of generators whose model has gated delta nets: states in place of keys and values."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.generation.generator_config import GeneratorConfig, block_tokens, kv_bytes_at_least
from rl.model.shape import shape_of
from tests.generation.test_engine import in_chunks
from tests.generation.test_swap import share_prefixes_across_a_swap
from tests.kit.generator_ranks import GeneratorRanks, generate, push, request
from tests.kit.policies import HYBRID, Policy, error
from tests.kit.schedules import play, schedule
from tests.kit.tables import long

CONFIG = GeneratorConfig(kv_cache_gib=0.02, max_batched_tokens=256, max_running_requests=16)


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    return [Policy(HYBRID, seed=seed, scale=2.0) for seed in range(2)]


@pytest.fixture(scope="module")
def hybrid():
    ranks = GeneratorRanks(CONFIG, HYBRID)
    yield ranks
    ranks.close()


def test_chunks_prefixes_and_preemption_change_no_token(hybrid, policies):
    hybrid.run(push, policies[0].weights, 1)
    rng = np.random.default_rng(0)
    asks = [ask(f"{n}", length, rng) for n, length in enumerate([1, 24, 65, 150])]
    asks.append(replace(asks[3], request_id="twin", seed=9))
    ((whole, _),) = hybrid.run(in_chunks, asks, tokens=256, room=None)
    for tokens, room in ((37, None), (100, 14)):
        ((cut, preemptions),) = hybrid.run(in_chunks, asks, tokens=tokens, room=room)
        assert (preemptions > 0) == (room is not None)
        for each, before, after in zip(asks, whole, cut, strict=True):
            assert after.tokens == before.tokens
            assert error(policies[0], each.prompt_tokens, after) <= 1e-5


@pytest.mark.parametrize("rounds", [4, long(200)])
def test_every_token_has_the_log_prob_of_its_version_on_any_schedule(hybrid, policies, rounds):
    rng = np.random.default_rng(rounds)
    hits = preemptions = swaps = 0
    for number in range(rounds):
        plan = schedule(number, rng, HYBRID.vocab_size, rooms=(13, 20))
        hybrid.run(push, policies[0].weights, 1)
        ((completions, cached, preempted),) = hybrid.run(play, plan, policies[1].weights)
        hits += cached
        preemptions += preempted
        for each, completion in zip(plan["asks"], completions, strict=True):
            prompt, versions = each.prompt_tokens, torch.tensor(completion.versions)
            assert versions.tolist() == sorted(completion.versions)
            for version in set(completion.versions):
                own = policies[version - 1].logprobs(prompt, completion.tokens)
                off = (torch.tensor(completion.logprobs) - own).abs()
                assert (off[versions == version] <= 2e-5).all(), (number, each.request_id)
            swaps += len(set(completion.versions)) == 2
    assert hits > 0
    assert preemptions > 0
    assert swaps > 0


@pytest.mark.parametrize("swap", ["recompute", long("continue")])
def test_other_requests_see_no_state_of_older_weights(hybrid, policies, swap):
    hybrid.run(push, policies[0].weights, 1)
    ((asked, completions),) = hybrid.run(share_prefixes_across_a_swap, swap, policies[1].weights)
    for each, completion in zip(asked, completions, strict=True):
        assert set(completion.versions) == {2}
        assert error(policies[1], each.prompt_tokens, completion) <= 1e-5, each.request_id


def test_offload_and_push_restore_completions(hybrid, policies):
    asks = [ask(str(n), length, np.random.default_rng(n)) for n, length in enumerate([24, 150])]
    hybrid.run(push, policies[0].weights, 1)
    before = hybrid.run(generate, asks)
    hybrid.run(away_and_back)
    hybrid.run(push, policies[0].weights, 2)
    (after,) = hybrid.run(generate, asks)
    assert [each.tokens for each in after] == [each.tokens for each in before[0]]


@pytest.mark.long
def test_two_ranks_divide_heads_and_states(policies):
    ranks = GeneratorRanks(replace(CONFIG, tensor_parallel_degree=2), HYBRID)
    try:
        ranks.run(push, policies[0].weights, 1)
        rng = np.random.default_rng(3)
        asks = [ask(str(n), length, rng) for n, length in enumerate([1, 24, 150])]
        first, second = ranks.run(generate, asks)
        (shapes, _) = ranks.run(shapes_of_states)
    finally:
        ranks.close()
    assert first == second
    assert shapes == [[(3, 128), (2, 32, 32)]] * 3
    for each, completion in zip(asks, first, strict=True):
        assert error(policies[0], each.prompt_tokens, completion) <= 1e-5


def test_the_plan_knows_the_size_of_blocks_and_the_smallest_cache(hybrid):
    shape = shape_of(HYBRID)
    assert hybrid.run(size_of_blocks) == [block_tokens(CONFIG, shape, cuda=False)]
    least = kv_bytes_at_least(CONFIG, shape, cuda=False)
    hybrid.rebuild(HYBRID, kv_cache_gib=(least + 1) / 2**30)
    with pytest.raises(ValueError, match="KV cache"):
        hybrid.rebuild(HYBRID, kv_cache_gib=0.8 * least / 2**30)
    hybrid.rebuild(HYBRID)


def ask(name: str, length: int, rng: np.random.Generator, **sampling):
    prompt = rng.integers(HYBRID.vocab_size, size=length).tolist()
    return request(name, prompt, seed=length, **{"max_tokens": 40} | sampling)


# Run on the ranks.


def away_and_back(engine) -> None:
    engine.offload()
    engine.onload()


def shapes_of_states(engine) -> list:
    layers = engine._model.titan.layers.values()
    nets = [layer.delta_net for layer in layers if layer.attention is None]
    return [[tuple(each.shape[1:]) for each in net.inner.cache.kv_cache] for net in nets]


def size_of_blocks(engine) -> int:
    return engine._engine.vllm_config.cache_config.block_size
