"""Gated delta nets over vLLM's cache of states, in place of those of documents."""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.protocols.module import Module
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from rl.generation.generator_config import delta_states
from rl.model.delta_rule import Heads, States, delta_net
from rl.model.shape import ModelShape


class StateCache(MambaBase):
    """States of a layer in all blocks of vLLM's cache, which finds the layer by ``name``."""

    mamba_type = MambaAttentionBackendEnum.GDN_ATTN  # whose metadata a CPU can build

    def __init__(self, name: str):
        self.name = name
        config = get_current_vllm_config()
        self._shapes = state_shapes(config)
        self._dtypes = state_dtypes(config)
        config.compilation_config.static_forward_context[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self._shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self._dtypes


class CachedDelta(Module):
    """Convolution and delta rule of the requests of a step, from their states on."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer: int
        heads: Heads

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.cache = StateCache(f"layers.{config.layer}.delta_net")

    def forward(
        self,
        qkv_BLD: torch.Tensor,
        decay_BLN: torch.Tensor,
        beta_BLN: torch.Tensor,
        weight: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Return the outputs [B, L, N, value_dim] of :func:`rl.model.delta_rule.delta_net` for
        requests that are concatenated in one row (B = 1), and update their states.
        """
        qkv, decay, beta = (tensor.squeeze(0) for tensor in (qkv_BLD, decay_BLN, beta_BLN))
        out = qkv_BLD.new_zeros(*decay_BLN.shape, self.heads.value_dim)
        steps: Any = is_forward_context_available() and get_forward_context().attn_metadata
        if not steps:  # vLLM warms up, or the model is rehearsed
            return out
        step = steps[self.cache.name]
        starts = step.non_spec_query_start_loc.tolist()
        blocks = step.non_spec_state_indices_tensor.long()
        decodes = step.num_decodes
        for first, last in ((0, decodes), (decodes, decodes + step.num_prefills)):
            if first == last:
                continue
            tokens = slice(starts[first], starts[last])
            ends = zip(starts[first:last], starts[first + 1 : last + 1], strict=True)
            lengths = tuple(end - start for start, end in ends)
            before = States(*(cache[blocks[first:last]] for cache in self.cache.kv_cache))
            if first == decodes:  # new requests have blocks with the states of others
                for states in before:
                    states[~step.has_initial_state[first:last]] = 0
            inputs = qkv[tokens], decay[tokens], beta[tokens]
            out[0, tokens], after = delta_net(*inputs, weight, self.heads, lengths, before)
            for cached, state in zip(self.cache.kv_cache, after, strict=True):
                cached[blocks[first:last]] = state.to(cached.dtype)
        return out


def state_shapes(config: VllmConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a rank's States of one request."""
    shape = ModelShape(**config.additional_config["shape"])  # type: ignore[arg-type]
    return delta_states(shape, config.parallel_config.tensor_parallel_size)


def state_dtypes(config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of States. What has passed the convolution has the model's dtype."""
    dtype: Any = config.model_config.dtype
    return dtype, torch.float32
