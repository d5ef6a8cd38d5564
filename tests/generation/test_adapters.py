"""Adapters side by side: each request has the log-probs of its own merged weights."""

from dataclasses import replace

import pytest
import torch

from rl.errors import RunError
from rl.generation.generator_config import BankConfig, GeneratorConfig
from tests.generation.conftest import SMALL
from tests.kit.generator_ranks import INTERPRETED, GeneratorRanks, generate, push, request
from tests.kit.policies import TIED_SPLIT, UNTIED_SPLIT, Policy, error
from tests.kit.tables import cases

RANK = 4
FEW = 8
"""Number of requests that an interpreter of kernels runs at once."""
SPLIT = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
FUSED = replace(UNTIED_SPLIT, fuse_qkv=True)
CASES = {
    "head": ({}, FUSED, ("wqkv", "wo", "w1", "w2", "w3", "lm_head"), {}),
    "split": ({}, TIED_SPLIT, SPLIT, {}),
    "two ranks that share a key head": (
        {"tensor_parallel_degree": 2},
        replace(FUSED, n_kv_heads=1, vocab_size=65),
        ("wqkv", "wo", "w1", "w2", "w3", "lm_head"),
        {},
    ),
    "runner of GPUs": ({"max_running_requests": FEW}, TIED_SPLIT, SPLIT, INTERPRETED),
}
LONG = [*range(1, 60), *range(5, 30)]
PROMPTS = [[5], LONG, [7, 3] * 60]


@pytest.fixture(params=cases(CASES, ["head", "two ranks that share a key head"]))
def case(request):
    return CASES[request.param]


@pytest.fixture
def generator(case):
    """A generator with room for three adapters."""
    options, model, layers, more = case
    config = GeneratorConfig(**SMALL | options)
    ranks = GeneratorRanks(config, model, adapters=BankConfig(3, RANK, layers), **more)
    yield ranks
    ranks.close()


def factors_of(policy: Policy, layers: tuple[str, ...], seed: int) -> dict:
    """Return a random adapter, whose products are as large as the weights."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(RANK, weight.shape[1], generator=draw) * weight.std() / RANK,
            torch.randn(weight.shape[0], RANK, generator=draw),
        )
        for name, weight in policy.weights.items()
        if name.split(".")[-2] in layers
    }


def load(engine, number: int, place: int, factors: dict) -> None:
    engine.load_adapter(number, place, factors)


def asked(adapters: list[int], name: str, *, few: bool = False):
    """Return a request for each prompt and adapter; few and short ones for an interpreter."""
    options = {"max_tokens": 3 if few else 16, "prompt_logprobs": 0}
    return [
        replace(request(f"{name}/{adapter}/{index}", prompt, **options), adapter=adapter)
        for index, prompt in enumerate([[5], [7, 3] * 18] if few else PROMPTS)
        for adapter in adapters
    ]


def check(generator, policies: dict[int, Policy], name: str) -> None:
    """Check the log-probs of answers and prompts of all adapters in one batch."""
    requests = asked([*policies], name, few=generator.config.max_running_requests == FEW)
    completions = generator.run(generate, requests)[0]
    for each, found in zip(requests, completions, strict=True):
        own = policies[each.adapter]
        prompt = each.prompt_tokens
        assert error(own, prompt, found) <= 1e-5
        told = torch.tensor(found.prompt_logprobs[1:])
        scored = own.logprobs(prompt[:1], prompt[1:])
        assert len(prompt) == 1 or (told - scored).abs().max() <= 1e-5


def cached(engine, each) -> int:
    """Return the number of tokens of a prompt that the prefix cache has."""
    before = engine._requests.counts["cached_tokens"]
    generate(engine, [each])
    return engine._requests.counts["cached_tokens"] - before


def test_each_request_has_the_log_probs_of_its_own_adapter(generator, case):
    """In one batch, with chunks of prompts, with cached prefixes, after an adapter took the place
    of another one, and after the weights under them changed.
    """

    def merged(policy: Policy, factors: dict) -> Policy:
        """Return the policy with the adapter merged into its weights."""
        whole = Policy(policy.config, seed=0)
        with torch.no_grad():
            for name, weight in whole.weights.items():
                weight.copy_(policy.weights[name])
                if name in factors:
                    a, b = factors[name]
                    weight += b @ a
        return whole

    _, model, layers, _ = case
    base = Policy(model, seed=1)
    generator.run(push, base.weights, 1)
    check(generator, {0: base}, "alone")
    factors = {number: factors_of(base, layers, number) for number in range(1, 6)}
    policies = {0: base} | {number: merged(base, each) for number, each in factors.items()}
    for number in (1, 2, 3):
        generator.run(load, number, number - 1, factors[number])
    present = {number: policies[number] for number in range(4)}
    check(generator, present, "first")
    check(generator, present, "again")

    generator.run(load, 5, 1, factors[5])
    generator.run(load, 4, 1, factors[4])  # comes late
    del present[2]
    check(generator, present | {5: policies[5]}, "another")
    with pytest.raises(ValueError, match="does not hold adapter 2"):
        generator.run(generate, asked([2], "gone"))

    other = Policy(model, seed=2)
    generator.run(push, other.weights, 2)
    below = {number: merged(other, factors[number]) for number in (1, 3, 5)}
    check(generator, {0: other} | below, "below")


@pytest.mark.parametrize("case", [CASES["split"]])
def test_adapters_do_not_share_cached_prefixes(generator, case):
    base = Policy(case[1], seed=1)
    generator.run(push, base.weights, 1)
    factors = [factors_of(base, case[2], seed) for seed in (1, 2)]
    for number, each in enumerate(factors, 1):
        generator.run(load, number, number - 1, each)

    def found(name: str, number: int) -> int:
        each = replace(request(name, LONG, prompt_logprobs=None), adapter=number)
        return generator.run(cached, each)[0]

    assert [found("a", 1), found("b", 2), found("c", 0)] == [0, 0, 0]
    assert [found("d", 1), found("e", 2), found("f", 0)] == [64, 64, 64]
    generator.run(load, 3, 0, factors[0])
    assert found("g", 3) == 0


@pytest.mark.parametrize("case", [CASES["split"]])
def test_an_adapter_of_other_layers_is_refused(generator, case):
    base = Policy(case[1], seed=1)
    factors = factors_of(base, ("wq", "wk", "wv", "wo", "w1", "w2"), 1)
    with pytest.raises(RunError, match="other layers than the generator"):
        generator.run(load, 1, 0, factors)
