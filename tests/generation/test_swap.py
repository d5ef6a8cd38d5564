"""Newer weights with requests in flight, in the three modes: versions and log-probs are correct."""

import pytest
import torch

from rl.errors import RunError
from tests.generation.scenarios import swapping
from tests.kit.generator_ranks import finish, push, request, scheduler_of
from tests.kit.policies import error, logprobs_of_swaps
from tests.kit.tables import long

REQUESTS = [
    request("a", [9] * 70, max_tokens=60, seed=1),
    request("b", range(50), max_tokens=90, seed=2),
    request("c", [*range(40), 7], max_tokens=50, seed=3),
]
DRAWN = [10, 45]  # tokens of each request when a newer version comes


@pytest.mark.parametrize("swap", [long("recompute"), "continue"])
def test_every_token_in_flight_has_its_version_and_that_versions_logprob(
    one_or_two_ranks, policy, other_policy, third_policy, swap
):
    policies = [policy, other_policy, third_policy]
    newer = {2: other_policy.weights, 3: third_policy.weights}
    completions, *followers = one_or_two_ranks.run(swap_in_flight, swap, newer)
    assert all(same == completions for same in followers)
    for each, completion in zip(REQUESTS, completions, strict=True):
        prompt = each.prompt_tokens
        tokens = completion.tokens
        assert completion.versions == [1] * 10 + [2] * 35 + [3] * (len(tokens) - 45)
        claimed = torch.tensor(completion.versions) - 1, torch.arange(len(tokens))
        fresh = torch.stack([policy.logprobs(prompt, tokens) for policy in policies])[claimed]
        mixed = logprobs_of_swaps(policies, prompt, tokens, DRAWN)[claimed]
        reported = torch.tensor(completion.logprobs)
        assert (reported - (mixed if swap == "continue" else fresh)).abs().max() <= 1e-4
        assert (fresh - mixed).abs().max() > 0.1  # the two are distinguishable


@pytest.mark.parametrize("swap", [long("recompute"), "continue"])
@pytest.mark.parametrize("one_or_two_ranks", ["generator", long("generators")], indirect=True)
def test_other_requests_see_no_key_or_value_of_older_weights(one_or_two_ranks, other_policy, swap):
    """Requests that have finished, and requests in flight before and after the swap, fill it."""
    asked, completions = one_or_two_ranks.run(
        share_prefixes_across_a_swap, swap, other_policy.weights
    )[0]
    for each, completion in zip(asked, completions, strict=True):
        assert set(completion.versions) == {2}
        assert error(other_policy, each.prompt_tokens, completion) <= 1e-4, each.request_id


def test_a_request_preempted_at_the_swap_is_recomputed_completely(generator, policy, other_policy):
    """It has tokens and waits for memory while its neighbour continues with its KV cache."""
    ((running, preempted),) = generator.run(swap_while_preempted, other_policy.weights)
    for each, completion, goes_on in [
        (REQUESTS[0], running, True),
        (REQUESTS[1], preempted, False),
    ]:
        prompt = each.prompt_tokens
        tokens = completion.tokens
        drawn = completion.versions.count(1)
        assert 0 < drawn < len(tokens)
        assert completion.versions == [1] * drawn + [2] * (len(tokens) - drawn)
        old, new = logprobs_of_swaps([policy, other_policy], prompt, tokens, [drawn])
        new = new if goes_on else other_policy.logprobs(prompt, tokens)
        truth = torch.cat([old[:drawn], new[drawn:]])
        assert (torch.tensor(completion.logprobs) - truth).abs().max() <= 1e-4


@pytest.mark.parametrize("swap", ["drain", "continue"])
def test_a_cache_that_survives_is_an_error(generator, swap):
    with pytest.raises(RunError, match="did not reset its prefix cache for policy version 9"):
        generator.run(swap_with_stuck_cache, swap)


# Run on the ranks.


def swap_in_flight(engine, swap, newer):
    for each in REQUESTS:
        engine.add(each)
    steps = 0
    with swapping(engine, swap):
        for drawn, (version, weights) in zip(DRAWN, newer.items(), strict=True):
            while steps < drawn:
                assert engine.step() == []
                steps += 1
            push(engine, weights, version)
    return finish(engine, REQUESTS)


def share_prefixes_across_a_swap(engine, swap, weights):
    finished = request("finished", [9] * 70, max_tokens=60, seed=8)
    engine.add(finished)
    (before,) = finish(engine, [finished])
    flying = request("flying", [5] * 70, max_tokens=120, seed=1)
    engine.add(flying)
    for _ in range(10):
        engine.step()
    waiting = request("waiting", [5] * 70, seed=4)
    engine.add(waiting)
    with swapping(engine, swap):
        push(engine, weights, 2)
    # its blocks are a prefix of the blocks that "flying" fills from now on
    fresh = request("fresh", [5] * 70, seed=5)
    engine.add(fresh)
    *first, flown = finish(engine, [waiting, fresh, flying])
    heirs = [
        request("heir of flying", flying.prompt_tokens + flown.tokens[:100], seed=6),
        request("heir of finished", finished.prompt_tokens + before.tokens, seed=7),
    ]
    for each in heirs:
        engine.add(each)
    return [waiting, fresh, *heirs], [*first, *finish(engine, heirs)]


def swap_while_preempted(engine, weights):
    scheduler = scheduler_of(engine)
    pool = scheduler.kv_cache_manager.block_pool
    for each in REQUESTS[:2]:
        engine.add(each)
    engine.step()
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    while len(scheduler.running) == 2:  # until one preempts the other for a block
        engine.step()
    try:
        with swapping(engine, "continue"):
            push(engine, weights, 2)
    finally:
        pool.free_blocks(taken)
    return finish(engine, REQUESTS[:2])


def swap_with_stuck_cache(engine, swap):
    engine.add(request("r", [3] * 70, max_tokens=9))
    engine.step()
    manager = scheduler_of(engine).kv_cache_manager
    manager.evict_blocks = lambda blocks: None
    try:
        with swapping(engine, swap):
            engine.weights_changed(9)
    finally:
        del manager.evict_blocks
        engine.abort(["r"])
