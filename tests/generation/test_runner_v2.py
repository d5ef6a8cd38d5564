"""Contracts of the engine with vLLM's Model Runner V2, which GPUs run. Here it runs on CPU, and
Triton interprets its kernels.
"""

import pytest

from tests.generation.ranks import generate, request
from tests.generation.test_engine import (  # noqa: F401
    test_a_weight_that_was_not_pushed_is_an_error,
    test_greedy_and_sampled_requests_keep_their_own_logprobs_in_one_batch,
)
from tests.generation.test_sampling_masks import check_cut


@pytest.fixture
def generator(interpreted):
    return interpreted


def test_a_warm_up_leaves_numbers_in_the_cache(interpreted_rank):
    """Kernels multiply masked entries too, and 0 * NaN is NaN."""
    unpushed = interpreted_rank.at_birth[0]
    assert unpushed["all_nan"]
    assert unpushed["finite_cache"]


def test_a_seed_and_a_position_give_the_token_whatever_else_is_in_the_batch(generator):
    seeds = [1, 2, 1 + 2**40, -1]
    (together,) = generator.run(generate, [asked(f"s{seed}", seed) for seed in seeds])
    (alone,) = generator.run(generate, [asked("again", 1)])
    assert alone[0].tokens == together[0].tokens
    assert len({tuple(completion.tokens) for completion in together}) == len(seeds)


def test_logprobs_are_over_the_ids_that_the_mask_keeps(generator, policy):
    """Triton's interpreter can run the kernel of min-p, but not those of top-p and top-k."""
    check_cut(generator, policy, {"min_p": 0.2})


def asked(name: str, seed: int):
    return request(name, seed=seed, max_tokens=8)
