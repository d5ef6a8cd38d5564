"""Completions have the experts with which each token was computed when the next one was drawn."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.types import Completion, GenerationRequest
from rl.types.routed_experts import dtype_of
from tests.generation.test_swap import (
    DRAWN,
    REQUESTS,
    share_prefixes_across_a_swap,
    swap_in_flight,
    swap_while_preempted,
)
from tests.kit.generator_ranks import finish, push, request, scheduler_of
from tests.kit.policies import EXPERTS, NARROW, Policy, logprobs_of_swaps
from tests.kit.tables import long

PROMPT = [*range(60), *range(10)]
LONG = [*range(60)] * 4
"""Model Runner V2 computes this prompt in two steps."""
FORMS = {
    "uint16": (
        replace(EXPERTS, num_experts=300, moe_hidden_dim=32, expert_bias=False),
        {"expert_parallel": False},
    ),
    "parts of experts": (NARROW, {"expert_parallel": False}),
    "compiled": (EXPERTS, {"expert_parallel": False, "enforce_eager": False}),
}


@pytest.mark.parametrize("swap", ["recompute", "continue"])
def test_a_record_stays_if_newer_weights_compute_the_token_again(
    generators, policy, other_policy, third_policy, swap
):
    policies = [policy, other_policy, third_policy]
    newer = {2: other_policy.weights, 3: third_policy.weights}
    completions, *followers = generators.run(swap_in_flight, swap, newer)
    assert all(same == completions for same in followers)
    for each, completion in zip(REQUESTS, completions, strict=True):
        tokens = completion.tokens
        fresh = [experts(policy, each.prompt_tokens, tokens) for policy in policies]
        mixed = experts_of_swaps(policies, each.prompt_tokens, tokens, DRAWN)
        truths = [at_draws(each, completion, found) for found in (fresh, mixed)]
        check(completion, truths[swap == "continue"])
        assert (truths[0] != truths[1]).any()  # the two are distinguishable


@pytest.mark.parametrize("swap", ["recompute", long("continue")])
def test_other_requests_have_no_experts_of_older_weights(generators, other_policy, swap):
    (asked, completions), *_ = generators.run(
        share_prefixes_across_a_swap, swap, other_policy.weights
    )
    for each, completion in zip(asked, completions, strict=True):
        check(completion, experts(other_policy, each.prompt_tokens, completion.tokens))


def test_a_preempted_request_keeps_the_records_of_its_draws(generators, policy, other_policy):
    (running, preempted), *_ = generators.run(swap_while_preempted, other_policy.weights)
    policies = [policy, other_policy]
    drawn = running.versions.count(1)
    mixed = experts_of_swaps(policies, REQUESTS[0].prompt_tokens, running.tokens, [drawn])
    check(running, at_draws(REQUESTS[0], running, mixed))
    fresh = [experts(each, REQUESTS[1].prompt_tokens, preempted.tokens) for each in policies]
    check(preempted, at_draws(REQUESTS[1], preempted, fresh))


def test_cached_prefixes_have_the_experts_that_computed_them(generators, policy):
    ((asked, completions, computed), *_) = generators.run(two_turns)
    for each, completion in zip(asked, completions, strict=True):
        check(completion, experts(policy, each.prompt_tokens, completion.tokens), each.experts_from)
    assert computed < sum(map(len, (each.experts for each in completions))) - 5 * 64


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_the_model_record_their_experts(rebuilt, form):
    model, changes = FORMS[form]
    policy = Policy(model, seed=2)
    for _ in range(2):  # the second time, compiled code may come from a cache
        rebuilt.rebuild(model, **changes)
        rebuilt.run(push, policy.weights, 1)
        test_cached_prefixes_have_the_experts_that_computed_them(rebuilt, policy)


def test_requests_that_end_early_leave_no_record(generators):
    assert generators.run(abort_one) == [[]] * len(generators.processes)


def check(completion: Completion, truth: np.ndarray, first: int = 0) -> None:
    """Check the experts of all tokens from ``first`` except for the last one."""
    assert completion.experts is not None
    ids = completion.experts.ids
    assert ids.dtype == truth.dtype
    assert len(ids) == len(truth)
    assert completion.experts.known.tolist() == [first <= t < len(ids) - 1 for t in range(len(ids))]
    assert np.array_equal(np.sort(ids[first:-1]), np.sort(truth[first:-1]))


def experts(policy: Policy, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """The experts that ``policy`` chooses, [T, layers, K]."""
    return experts_of_swaps([policy], prompt, tokens, [])[0]


def experts_of_swaps(
    policies: list[Policy], prompt: list[int], tokens: list[int], drawn: list[int]
) -> list[np.ndarray]:
    """The experts that each policy chooses, each on the KV cache of the previous one."""
    with chosen(policies) as found:
        logprobs_of_swaps(policies, prompt, tokens, drawn)
    dtype = dtype_of(policies[0].config.num_experts)
    return [torch.stack(each, 1).numpy().astype(dtype) for each in found]


@contextmanager
def chosen(policies: list[Policy]) -> Iterator[list[list[torch.Tensor]]]:
    found: list[list[torch.Tensor]] = [[] for _ in policies]
    hooks = [
        layer.moe.router.register_forward_hook(lambda _, __, out, to=to: to.append(out[1][0]))
        for policy, to in zip(policies, found, strict=True)
        for layer in policy.model.layers.values()
    ]
    yield found
    for hook in hooks:
        hook.remove()


def at_draws(
    asked: GenerationRequest, completion: Completion, found: list[np.ndarray]
) -> np.ndarray:
    """The experts of each token by the policy that drew the token after it, or the first token."""
    drawn_by = [completion.versions[0]] * (len(asked.prompt_tokens) - 1) + completion.versions
    drawn_by.append(completion.versions[-1])
    return np.stack([found[version - 1][token] for token, version in enumerate(drawn_by)])


# Run on the ranks.


def two_turns(engine):
    """Samples of a prompt, two of them a step later, beside a long one; then second turns."""
    scheduler = scheduler_of(engine)
    update = scheduler.update_from_output
    computed = 0

    def counted(scheduler_output, model_runner_output):
        nonlocal computed
        computed += scheduler_output.total_num_scheduled_tokens
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = counted
    first = [request(f"turn 1 of {i}", PROMPT, seed=i, max_tokens=10 + i) for i in range(4)]
    for each in first[:2]:
        engine.add(each)
    engine.step()
    for each in first[2:]:
        engine.add(each)
    first.append(request("long", LONG, max_tokens=8))
    engine.add(first[-1])
    answers = finish(engine, first)
    second = []
    for i, answer in enumerate(answers[:4]):
        prompt = [*PROMPT, *answer.tokens, 7, 8, i]
        asked = request(f"turn 2 of {i}", prompt, seed=i, max_tokens=40)
        known = (0, 1, len(PROMPT) + len(answer.tokens) - 1, len(prompt))[i]
        second.append(replace(asked, experts_from=known))
    for each in second:
        engine.add(each)
    return [*first, *second], [*answers, *finish(engine, second)], computed


def abort_one(engine):
    for name in "ab":
        engine.add(request(name, PROMPT))
    engine.step()
    engine.abort(["a"])
    finish(engine, [request("b")])
    return [*engine._requests._records._records]
