"""Tiny random policies, the same in torchtitan (the reference) and in generator ranks."""

import pytest
import torch
from generation_ranks import GeneratorRanks, push
from torchtitan.models.common.attention import ScaledDotProductAttention

from rl.generation.config import GeneratorConfig
from rl.model.qwen3 import qwen3_config
from rl.model.shape import ModelConfig, shape_of
from rl.platform import select_device

SIZES = {"vocab_size": 64, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "max_seq_len": 256}
TIED_FUSED = ModelConfig(**SIZES, tie_embeddings=True, fuse_qkv=True)
UNTIED_SPLIT = ModelConfig(**SIZES, tie_embeddings=False, fuse_qkv=False)


class Policy:
    """torchtitan's own model with random weights, three times the usual so that some tokens are likelier."""

    def __init__(self, config: ModelConfig, seed: int):
        select_device()
        shape = shape_of(config)
        self.model = qwen3_config(
            shape, fuse_qkv=config.fuse_qkv, inner_attention=ScaledDotProductAttention.Config()
        ).build()
        torch.manual_seed(seed)
        self.model.init_states(buffer_device=torch.device("cpu"))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
        self.weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def logprobs(self, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Of each of ``tokens`` after ``prompt``: log_softmax(logits / temperature), float32 [len(tokens)]."""
        ids = torch.tensor([prompt + tokens])
        logits = self.model(ids, torch.arange(ids.shape[1]).unsqueeze(0))[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


def error(policy: Policy, prompt, completion, temperature: float = 1.0) -> float:
    """Largest difference between the completion's log-probs and the policy's own."""
    own = policy.logprobs(list(prompt), completion.tokens, temperature)
    return (torch.tensor(completion.logprobs) - own).abs().max().item()


def start(model: ModelConfig, tp: int) -> GeneratorRanks:
    return GeneratorRanks(GeneratorConfig(tensor_parallel_degree=tp, kv_cache_gib=0.05, block_size=32), model)


@pytest.fixture(scope="session")
def policy() -> Policy:
    return Policy(TIED_FUSED, seed=0)


@pytest.fixture(scope="session")
def other_policy() -> Policy:
    return Policy(TIED_FUSED, seed=1)


@pytest.fixture(scope="session")
def one_rank():
    ranks = start(TIED_FUSED, tp=1)
    yield ranks
    ranks.close()


@pytest.fixture
def generator(one_rank, policy):
    """One rank that holds ``policy`` as version 1."""
    one_rank.run(push, policy.weights, 1)
    return one_rank
