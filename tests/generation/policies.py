"""Tiny random policies in torchtitan, the reference that generators are held against."""

import torch
from torchtitan.models.common.attention import ScaledDotProductAttention

from rl.model.qwen3 import qwen3_config
from rl.model.shape import ModelConfig, shape_of
from rl.types import Completion

SIZES = {"vocab_size": 64, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "max_seq_len": 256}
TIED_FUSED = ModelConfig(**SIZES, tie_embeddings=True, fuse_qkv=True)
UNTIED_SPLIT = ModelConfig(**SIZES, tie_embeddings=False, fuse_qkv=False)
EXPERTS = ModelConfig(**SIZES, num_experts=4, experts_per_token=2, moe_hidden_dim=48)


class Policy:
    """torchtitan's own model with random weights, three times the usual so that some tokens are likelier."""

    def __init__(self, config: ModelConfig, seed: int):
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


def error(policy: Policy, prompt: list[int], completion: Completion, temperature: float = 1.0) -> float:
    """Largest difference between the completion's log-probs and the policy's own."""
    own = policy.logprobs(prompt, completion.tokens, temperature)
    return (torch.tensor(completion.logprobs) - own).abs().max().item()
