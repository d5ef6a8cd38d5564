"""Attention that trains on CPU, where torchtitan ships none that does."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import FlexAttention

from rl.errors import ConfigError
from rl.platform import device_type

if TYPE_CHECKING:
    from torchtitan.models.qwen3.model import Qwen3Model


class DenseAttention(FlexAttention):
    """Attention under a dense boolean mask. Memory grows with length squared: keep rows short.

    A FlexAttention by type, so that torchtitan shards and wraps it as its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(  # type: ignore[override]
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """q [B, L, N, H], k and v [B, L, N_kv, H], mask bool [B, 1, L, L] (True: attend) -> [B, L,
        N, H].
        """
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


def dense_mask(positions: torch.Tensor) -> torch.Tensor:
    """Causal mask within documents, bool [B, 1, L, L]; a document starts where ``positions`` [B, L]
    is 0.
    """
    document = (positions == 0).cumsum(1)
    length = positions.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & causal).unsqueeze(1)


def attention_masks(model: "Qwen3Model", positions: torch.Tensor) -> Any:
    """Return what the layers of ``model`` need to attend causally within the documents of
    ``positions`` [B, L].
    """
    if isinstance(model.config.first_attention.inner_attention, DenseAttention.Config):
        return dense_mask(positions)
    return model.get_attention_masks(positions)


def shares_rows(inner_attention: Any) -> bool:
    """Whether many sequences in one long row cost no more than in rows of their own."""
    return not isinstance(inner_attention, DenseAttention.Config)


def attention_config(name: str, *, context_parallel: bool = False) -> FlexAttention.Config | Any:
    """torchtitan config of attention ``name``.

    ``auto`` is dense on CPU, varlen on CUDA, and flex there under context parallelism, which
    torchtitan's varlen cannot.

    varlen and flex run on CUDA only; Tiller's tests, which run on CPU, do not cover them.
    """
    from torchtitan.models.common.config_utils import get_attention_config

    cuda = device_type() == "cuda"
    if name == "auto":
        name = "dense" if not cuda else "flex" if context_parallel else "varlen"
    if name == "dense":
        return DenseAttention.Config()
    if not cuda:
        raise ConfigError(
            f"model.attention is {name!r}, which needs CUDA; this host allows 'auto' and 'dense'"
        )
    return get_attention_config(name)
