"""All contracts of log-probs, swaps and offloads with Model Runner V2, interpreted on CPU."""

import pytest

from rl.types import GivenSequence
from tests.generation.test_engine import (  # noqa: F401
    test_aborted_requests_are_dropped_and_their_ids_are_free,
    test_greedy_always_takes_the_most_likely_token,
    test_logprobs_are_of_the_distribution_sampled_from,
    test_more_prompt_tokens_than_fit_a_step_take_several_steps,
    test_offload_frees_memory_and_onload_restores_completions,
    test_prefix_cache_does_not_outlive_the_weights,
    test_the_stop_token_is_part_of_the_completion,
    test_tokens_depend_on_the_seed_and_not_on_other_requests,
)
from tests.generation.test_swap import (  # noqa: F401
    test_a_request_preempted_at_the_swap_is_recomputed_completely,
    test_every_token_in_flight_has_its_version_and_that_versions_logprob,
    test_other_requests_see_no_key_or_value_of_older_weights,
)

pytestmark = pytest.mark.long


@pytest.fixture
def generator(interpreted):
    return interpreted


@pytest.fixture
def one_or_two_ranks(interpreted):
    return interpreted


def test_given_tokens_are_sampled_with_the_logprobs_of_the_model(generator, policy):
    sequence = GivenSequence(tokens=[1, 2, 3, 9, 8, 7], given=3, positions=[3, 4])
    (found,) = generator.run(given, sequence)
    own = policy.logprobs([1, 2, 3], [9, 8, 7])
    assert (found.logprobs[3:] - own).abs().max() <= 1e-5
    assert found.logits.shape == (2, 64)


def given(engine, sequence: GivenSequence):
    return engine.activations(sequence)
