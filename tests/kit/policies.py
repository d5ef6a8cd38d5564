"""Tiny random policies in torchtitan, the reference for generators."""

from dataclasses import replace
from functools import partial

import torch
from torchtitan.models.common.attention import ScaledDotProductAttention

from rl.model.decoder import decoder_config
from rl.model.shape import ModelConfig, shape_of
from rl.types import Completion

SIZES = {
    "vocab_size": 64,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 32,
    "max_seq_len": 256,
}
TIED_FUSED = ModelConfig(**SIZES, tie_embeddings=True, fuse_qkv=True)
TIED_SPLIT = replace(TIED_FUSED, fuse_qkv=False)
UNTIED_SPLIT = ModelConfig(**SIZES, tie_embeddings=False, fuse_qkv=False)
HYBRID = ModelConfig(**SIZES | {"n_layers": 4}, family="qwen3_5_text")
"""Three layers with a gated delta net, then one with attention."""
BIASED = ModelConfig(**SIZES, family="tests.kit.seed_oss")
EXPERTS = ModelConfig(
    **SIZES, num_experts=4, experts_per_token=2, moe_hidden_dim=48, expert_bias=True
)
NARROW = replace(EXPERTS, n_kv_heads=1, vocab_size=65, tie_embeddings=False)


class Policy:
    """torchtitan's own model with random weights, ``scale`` times the usual ones."""

    def __init__(self, config: ModelConfig, seed: int, *, scale: float = 3.0):
        self.config = config
        shape = shape_of(config)
        self.model = decoder_config(
            shape, fuse_qkv=config.fuse_qkv, inner_attention=ScaledDotProductAttention.Config()
        ).build()
        torch.manual_seed(seed)
        with torch.no_grad():
            self.model.init_states(buffer_device=torch.device("cpu"))
            for name, parameter in self.model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
                parameter.mul_(scale if parameter.ndim > 1 else 1.0)
        self.weights = {
            name: parameter.detach() for name, parameter in self.model.named_parameters()
        }

    @torch.no_grad()
    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Return the logits for each of ``tokens`` after ``prompt``, float32 [len(tokens), V]."""
        ids = torch.tensor([prompt + tokens])
        logits = self.model(ids, torch.arange(ids.shape[1]).unsqueeze(0))
        return logits[0, len(prompt) - 1 : -1].float()

    @torch.no_grad()
    def logprobs(
        self, prompt: list[int], tokens: list[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Return log_softmax(logits / temperature) of each of ``tokens`` after ``prompt``."""
        logits = self.logits(prompt, tokens)
        return (
            torch.log_softmax(logits / temperature, -1)
            .gather(1, torch.tensor(tokens).unsqueeze(1))
            .squeeze(1)
        )


def error(
    policy: Policy, prompt: list[int], completion: Completion, temperature: float = 1.0
) -> float:
    """Return the largest difference between the completion's log-probs and the policy's own."""
    own = policy.logprobs(prompt, completion.tokens, temperature)
    return (torch.tensor(completion.logprobs) - own).abs().max().item()


def logprobs_of_swaps(
    policies: list[Policy], prompt: list[int], tokens: list[int], drawn: list[int]
) -> torch.Tensor:
    """Return the log-probs of each policy, float32 [len(policies), len(tokens)], if each policy
    continues on the KV cache of the previous one.

    ``policies[i + 1]`` takes over after ``drawn[i]`` tokens. The last of these is not in the cache
    yet: keys and values of the positions before it stay those of the earlier policies.
    """
    caches: dict[str, tuple[torch.Tensor, ...]] = {}
    logprobs = []
    for policy, end in zip(policies, [0, *(len(prompt) + n - 1 for n in drawn)], strict=True):
        hooks = [
            layer.attention.inner_attention.register_forward_pre_hook(
                partial(over_older, caches, name, end)
            )
            for name, layer in policy.model.layers.items()
        ]
        logprobs.append(policy.logprobs(prompt, tokens))
        for hook in hooks:
            hook.remove()
    return torch.stack(logprobs)


def over_older(caches: dict, layer: str, end: int, _module, args: tuple[torch.Tensor, ...]):
    """Replace keys and values before position ``end`` by those of the previous pass."""
    queries, *own = args
    if end:
        own = [
            torch.cat([old[:, :end], new[:, end:]], 1)
            for old, new in zip(caches[layer], own, strict=True)
        ]
    caches[layer] = tuple(own)
    return queries, *own
