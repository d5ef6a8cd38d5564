"""Generator ranks shared by the tests: the start of vLLM takes longer than the tests."""

import pytest

from rl.generation.config import GeneratorConfig
from tests.generation.policies import TIED_FUSED, Policy
from tests.generation.ranks import INTERPRETED, GeneratorRanks, push

SMALL = {"kv_cache_gib": 0.05, "block_size": 32, "max_batched_tokens": 256}


@pytest.fixture(scope="session")
def policy() -> Policy:
    return Policy(TIED_FUSED, seed=0)


@pytest.fixture(scope="session")
def other_policy() -> Policy:
    return Policy(TIED_FUSED, seed=1)


@pytest.fixture(scope="session")
def third_policy() -> Policy:
    return Policy(TIED_FUSED, seed=2)


@pytest.fixture(scope="session")
def one_rank():
    ranks = GeneratorRanks(GeneratorConfig(**SMALL), TIED_FUSED)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks():
    ranks = GeneratorRanks(GeneratorConfig(tensor_parallel_degree=2, **SMALL), TIED_FUSED)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def interpreted_rank():
    """One rank whose vLLM runs the model runner of GPUs; Triton interprets its kernels."""
    config = GeneratorConfig(**SMALL, max_running_requests=8)
    ranks = GeneratorRanks(config, TIED_FUSED, **INTERPRETED)
    yield ranks
    ranks.close()


@pytest.fixture
def interpreted(interpreted_rank, policy):
    """The rank with the model runner of GPUs, which holds ``policy`` as version 1."""
    interpreted_rank.run(push, policy.weights, 1)
    return interpreted_rank


@pytest.fixture
def generator(one_rank, policy):
    """One rank that holds ``policy`` as version 1."""
    one_rank.run(push, policy.weights, 1)
    return one_rank


@pytest.fixture
def generators(two_ranks, policy):
    """Two ranks of one generator that hold ``policy`` as version 1."""
    two_ranks.run(push, policy.weights, 1)
    return two_ranks


@pytest.fixture(params=["generator", "generators"], ids=["one rank", "two ranks"])
def one_or_two_ranks(request):
    """One generator of one or two ranks that holds ``policy`` as version 1."""
    return request.getfixturevalue(request.param)
