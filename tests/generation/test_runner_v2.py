"""Contracts of the engine with vLLM's Model Runner V2, which GPUs run. Here it runs on CPU, and
Triton interprets its kernels, which takes half a minute to start.
"""

import pytest

from rl.types import GivenSequence
from tests.generation.test_engine import (  # noqa: F401
    test_a_prompt_of_one_token_has_no_log_prob,
    test_a_weight_that_was_not_pushed_is_an_error,
    test_aborted_requests_are_dropped_and_their_ids_are_free,
    test_each_request_gets_as_many_of_the_most_likely_tokens_as_it_asks_for,
    test_greedy_always_takes_the_most_likely_token,
    test_greedy_and_sampled_requests_keep_their_own_logprobs_in_one_batch,
    test_log_probs_of_prompts_are_those_of_the_model,
    test_logprobs_are_of_the_distribution_sampled_from,
    test_more_prompt_tokens_than_fit_a_step_take_several_steps,
    test_offload_frees_memory_and_a_push_restores_completions,
    test_the_stop_token_is_part_of_the_completion,
    test_tokens_depend_on_the_seed_and_not_on_other_requests,
)
from tests.generation.test_expert_records import (  # noqa: F401
    test_a_preempted_request_keeps_the_records_of_its_draws,
    test_a_record_stays_if_newer_weights_compute_the_token_again,
    test_cached_prefixes_have_the_experts_that_computed_them,
    test_other_requests_have_no_experts_of_older_weights,
)
from tests.generation.test_sampling_masks import check_cut
from tests.generation.test_stop_texts import (  # noqa: F401
    folder,
    test_a_generator_ends_an_answer_with_the_token_that_completes_a_text,
)
from tests.generation.test_swap import (  # noqa: F401
    test_a_request_preempted_at_the_swap_is_recomputed_completely,
    test_every_token_in_flight_has_its_version_and_that_versions_logprob,
    test_other_requests_see_no_key_or_value_of_older_weights,
)
from tests.kit.generator_ranks import generate, push, request
from tests.kit.policies import EXPERTS

pytestmark = pytest.mark.long


@pytest.fixture
def generator(interpreted):
    return interpreted


@pytest.fixture
def generators(interpreted):
    return interpreted


@pytest.fixture
def one_or_two_ranks(interpreted):
    return interpreted


def test_a_warm_up_leaves_numbers_in_the_cache(interpreted_rank):
    """Kernels multiply masked entries too, and 0 * NaN is NaN."""
    unpushed = interpreted_rank.at_birth[0]
    assert unpushed["all_nan"]
    assert unpushed["finite_cache"]


def test_a_step_begins_before_the_tokens_of_the_one_before_are_read(interpreted, policy):
    """Unless experts are recorded, which are read before the next step."""
    found = []
    for records in (False, True):
        interpreted.rebuild(EXPERTS, record_experts=records)
        interpreted.run(push, policy.weights, 1)
        found += interpreted.run(steps_ahead, asked("r", 1))
    (ahead, at_rest, completion), (*none_ahead, again) = found
    assert (ahead, at_rest) == (1, 0)
    assert none_ahead == [0, 0]
    assert again.tokens == completion.tokens


def steps_ahead(engine, request):
    """Return the steps that are computed ahead in the midst of a request and after a wait."""
    engine.add(request)
    for _ in range(3):
        engine.step()
    steps = engine._engine.engine_core.engine_core.batch_queue or ()
    ahead = len(steps)
    engine.finish_steps()
    at_rest = len(steps)
    while not (finished := engine.step()):
        pass
    return ahead, at_rest, finished[0][1]


def test_a_seed_and_a_position_give_the_token_whatever_else_is_in_the_batch(generator):
    seeds = [1, 2, 1 + 2**40, -1]
    (together,) = generator.run(generate, [asked(f"s{seed}", seed) for seed in seeds])
    (alone,) = generator.run(generate, [asked("again", 1)])
    assert alone[0].tokens == together[0].tokens
    assert len({tuple(completion.tokens) for completion in together}) == len(seeds)


def test_logprobs_are_over_the_ids_that_the_mask_keeps(generator, policy):
    """Triton's interpreter can run the kernel of min-p, but not those of top-p and top-k."""
    check_cut(generator, policy, {"min_p": 0.2})


def test_given_tokens_are_sampled_with_the_logprobs_of_the_model(generator, policy):
    sequence = GivenSequence(tokens=[1, 2, 3, 9, 8, 7], given=3, positions=[3, 4])
    (found,) = generator.run(given, sequence)
    own = policy.logprobs([1, 2, 3], [9, 8, 7])
    assert (found.logprobs[3:] - own).abs().max() <= 1e-5
    assert found.logits.shape == (2, 64)


def given(engine, sequence: GivenSequence):
    return engine.activations(sequence)


def asked(name: str, seed: int):
    return request(name, seed=seed, max_tokens=8)
