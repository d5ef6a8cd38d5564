"""Tokens of cut distributions have the ids that they were drawn from and their log-probs."""

import math

import pytest
import torch

from rl.types import Completion
from tests.kit.generator_ranks import finish, generate, push, request
from tests.kit.policies import Policy

PROMPTS = [[5], list(range(1, 20)), [7] * 40]
TEMPERATURE = 0.7
CUTS = {
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 7},
    "greatest": {"top_k": 1},
    "min-p": {"min_p": 0.2},
    "all three": {"top_p": 0.8, "top_k": 7, "min_p": 0.1},
}


@pytest.mark.parametrize("cut", CUTS)
def test_logprobs_are_over_the_ids_that_the_mask_keeps(generators, policy, cut):
    check_cut(generators, policy, CUTS[cut])


def check_cut(generator, policy: Policy, cut: dict[str, float]) -> None:
    asked = [
        request(f"p{i}", prompt, seed=i, temperature=TEMPERATURE, **cut)
        for i, prompt in enumerate(PROMPTS)
    ]
    free = [request("free", seed=9), request("greedy", temperature=0.0, **cut)]
    completions, *followers = generator.run(generate, [*asked, *free])
    assert all(same == completions for same in followers)
    assert [each.sampling_mask for each in completions[len(asked) :]] == [None, None]
    sizes = set()
    for each, completion in zip(asked, completions, strict=False):
        logits = policy.logits(each.prompt_tokens, completion.tokens).double() / TEMPERATURE
        kept = [ids_kept(row, **cut) for row in logits]
        assert sets_of(completion) == kept
        assert error_over_masks(logits, completion) <= 1e-5
        sizes |= {*map(len, kept)}
    assert len(sizes) > 1 or [*cut] == ["top_k"]


def test_masks_of_tokens_in_flight_at_a_swap_stay(generator, policy, other_policy):
    asked = [
        request(f"p{i}", prompt, seed=i, max_tokens=20, top_p=0.8)
        for i, prompt in enumerate(PROMPTS)
    ]
    (completions,) = generator.run(swap_in_flight, asked, other_policy.weights)
    for each, completion in zip(asked, completions, strict=True):
        assert completion.versions == [1] * 8 + [2] * 12
        older, newer = (
            one.logits(each.prompt_tokens, completion.tokens) for one in (policy, other_policy)
        )
        logits = torch.cat([older[:8], newer[8:]]).double()
        assert sets_of(completion) == [ids_kept(row, top_p=0.8) for row in logits]
        assert error_over_masks(logits, completion) <= 1e-5


def test_an_aborted_request_leaves_no_masks_to_record(generator):
    (recording,) = generator.run(abort_a_cut_request)
    assert recording == (True, False)


def ids_kept(row: torch.Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0):
    """The ids of ``row`` that are left by min-p, top-k and top-p in this order; None for all."""
    probs = row.softmax(0)
    probs = torch.where(probs < min_p * probs.max(), 0.0, probs)
    order = probs.argsort(descending=True)[: top_k or None]
    order = order[probs[order] > 0]
    probs = probs[order] / probs[order].sum()
    kept = order[probs.cumsum(0) - probs < top_p]
    return sorted(kept.tolist()) if len(kept) < len(row) else None


def sets_of(completion: Completion) -> list[list[int] | None]:
    mask = completion.sampling_mask
    assert mask is not None and len(mask) == len(completion.tokens)
    found = [mask.ids(token) for token in range(len(mask))]
    return [None if ids is None else ids.tolist() for ids in found]


def error_over_masks(logits: torch.Tensor, completion: Completion) -> float:
    """The largest distance of the completion's log-probs from log_softmax over its masks."""
    worst = 0.0
    sets = sets_of(completion)
    for row, token, ids, logprob in zip(
        logits, completion.tokens, sets, completion.logprobs, strict=True
    ):
        own = row if ids is None else row[ids]
        worst = max(worst, abs(float(row[token] - own.logsumexp(0)) - logprob))
    assert math.isfinite(worst)
    return worst


# Run on the ranks.


def swap_in_flight(engine, requests, newer):
    for each in requests:
        engine.add(each)
    for _ in range(8):
        engine.step()
    push(engine, newer, 2)
    return finish(engine, requests)


def abort_a_cut_request(engine):
    engine.add(request("cut", top_k=3))
    engine.step()
    before = bool(engine._requests._cut)
    engine.abort(["cut"])
    return before, bool(engine._requests._cut)
