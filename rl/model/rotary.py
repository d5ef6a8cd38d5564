"""Rotary embedding with transformers' scalings."""

import dataclasses
from typing import Any

import torch
from torchtitan.models.common import CosSinRoPE


class RotaryEmbedding(CosSinRoPE):
    """torchtitan's rotary embedding with transformers' scalings, or one that rotates nothing."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        parameters: tuple[tuple[str, Any], ...] = ()
        """Items of transformers' parameters of a scaled embedding."""
        rotates: bool = True
        interleaved: bool = False
        """Whether neighbours are rotated, in place of the halves of a head."""

    config: Config

    def _precompute_cache(self) -> torch.Tensor:
        """Return cosines and sines, float32 [max_seq_len, 2 * dim]."""
        config = self.config
        if config.rotates and not config.parameters:
            return super()._precompute_cache()
        frequencies, factor = torch.zeros(config.dim // 2), 1.0
        if config.rotates:  # as transformers does, with a factor of cosines and sines
            from transformers import PreTrainedConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            parameters = {"rope_theta": config.theta, **dict(config.parameters)}
            described = PreTrainedConfig(
                rope_parameters=parameters,
                head_dim=config.dim,
                hidden_size=config.dim,
                num_attention_heads=1,
                max_position_embeddings=config.max_seq_len,
            )
            frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](described, None)
        angles = torch.outer(torch.arange(config.max_seq_len).float(), frequencies).repeat(1, 2)
        return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1)

    def apply_rotary_emb(  # type: ignore[override]
        self, query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``query`` and ``key`` [B, L, heads, head_dim], the first ``dim`` numbers of each
        head rotated by ``rope_cache``.
        """
        if (width := self.config.dim) < query.shape[-1]:
            rest = (query[..., width:], key[..., width:])
            q, k = self.apply_rotary_emb(query[..., :width], key[..., :width], rope_cache)
            return torch.cat([q, rest[0]], dim=-1), torch.cat([k, rest[1]], dim=-1)
        if not self.config.interleaved:
            return super().apply_rotary_emb(query, key, rope_cache)
        halves = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (query, key))
        rotated = super().apply_rotary_emb(*halves, rope_cache)
        q, k = (x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in rotated)
        return q, k
