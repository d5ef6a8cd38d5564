"""Generator ranks shared by the tests: the start of vLLM takes longer than the tests."""

import pytest

from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from tests.kit.generator_ranks import INTERPRETED, GeneratorRanks, push
from tests.kit.policies import EXPERTS, NARROW, TIED_SPLIT, Policy

SMALL = {"kv_cache_gib": 0.05, "max_batched_tokens": 256}


_policies: dict[str, list[Policy]] = {}


def policies(model: ModelConfig) -> list[Policy]:
    """Return three policies, made once."""
    if (key := repr(model)) not in _policies:
        _policies[key] = [Policy(model, seed=seed) for seed in range(3)]
    return _policies[key]


@pytest.fixture
def model(request) -> ModelConfig:
    """Model of the ranks that the test asks for."""
    asked = [*request.fixturenames]
    if "one_or_two_ranks" in asked and hasattr(request.node, "callspec"):
        asked.append(request.node.callspec.params.get("one_or_two_ranks"))
    if "interpreted" in asked:
        return EXPERTS
    return NARROW if "generators" in asked else TIED_SPLIT


@pytest.fixture
def policy(model) -> Policy:
    return policies(model)[0]


@pytest.fixture
def other_policy(model) -> Policy:
    return policies(model)[1]


@pytest.fixture
def third_policy(model) -> Policy:
    return policies(model)[2]


@pytest.fixture(scope="session")
def one_rank():
    """One rank with a model of tied embeddings and separate q, k and v."""
    ranks = GeneratorRanks(GeneratorConfig(**SMALL), TIED_SPLIT)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks():
    """Two ranks with a model of untied embeddings, fused q, k and v that share a key head, whole
    experts and an odd vocabulary. They record the experts of each token.
    """
    config = GeneratorConfig(
        tensor_parallel_degree=2, expert_parallel=True, record_experts=True, **SMALL
    )
    ranks = GeneratorRanks(config, NARROW)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def interpreted_rank():
    """One rank of the model runner of GPUs, with Triton interpreted, which records experts."""
    config = GeneratorConfig(**SMALL, max_running_requests=8, record_experts=True)
    ranks = GeneratorRanks(config, EXPERTS, **INTERPRETED)
    yield ranks
    ranks.close()


@pytest.fixture
def interpreted(interpreted_rank):
    """The rank with the model runner of GPUs, which holds ``policy`` as version 1."""
    interpreted_rank.run(push, policies(EXPERTS)[0].weights, 1)
    return interpreted_rank


@pytest.fixture
def generator(one_rank):
    """One rank that holds ``policy`` as version 1."""
    one_rank.restore()
    one_rank.run(push, policies(TIED_SPLIT)[0].weights, 1)
    return one_rank


@pytest.fixture
def generators(two_ranks):
    """Two ranks of one generator that hold ``policy`` as version 1."""
    two_ranks.restore()
    two_ranks.run(push, policies(NARROW)[0].weights, 1)
    return two_ranks


@pytest.fixture
def rebuilt(two_ranks):
    """Two ranks that the test may rebuild, or close the engines of."""
    yield two_ranks
    two_ranks.is_restored = False


@pytest.fixture(params=["generator", "generators"], ids=["one rank", "two ranks"])
def one_or_two_ranks(request):
    """One generator of one or two ranks that holds ``policy`` as version 1."""
    return request.getfixturevalue(request.param)
