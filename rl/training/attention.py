"""Attention that trains on CPU; torchtitan's own attention does not."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.tools.utils import get_cuda_flash_attention_impl

from rl.errors import require
from rl.platform import device_type


class DenseAttention(FlexAttention):
    """Attention with a dense boolean mask. Memory is quadratic in the length: keep rows short.

    It is a subclass of FlexAttention, so that torchtitan shards and wraps it.
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
        """Return the attention output [B, L, N, H] of q [B, L, N, H], k and v [B, L, N_kv, H]; the
        mask is bool [B, 1, L, L] (True: attend).
        """
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


def dense_mask(positions: torch.Tensor) -> torch.Tensor:
    """Return the causal mask within documents, bool [B, 1, L, L]. A document starts at each 0 of
    ``positions`` [B, L].
    """
    document = (positions == 0).cumsum(1)
    length = positions.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    return ((document[:, :, None] == document[:, None, :]) & causal).unsqueeze(1)


def attention_masks(model: Qwen3Model, positions: torch.Tensor) -> Any:
    """Return the masks with which the layers of ``model`` attend causally within the documents of
    ``positions`` [B, L].
    """
    if isinstance(model.config.first_attention.inner_attention, DenseAttention.Config):
        return dense_mask(positions)
    return model.get_attention_masks(positions)


def shares_rows(inner_attention: Any) -> bool:
    """Return whether several sequences in one long row cost no more than one sequence per row."""
    return not isinstance(inner_attention, DenseAttention.Config)


def attention_config(
    name: str, *, context_parallel: bool = False, float32: bool = False
) -> FlexAttention.Config | Any:
    """Return the torchtitan config of attention ``name``.

    ``auto`` is dense on CPU. On CUDA it is varlen, or flex if torchtitan's varlen cannot run: with
    context parallelism, without the FlashAttention that the GPU needs, or for a trainer that
    computes in ``float32``, which varlen would round to bfloat16.

    varlen and flex run on CUDA only; Tiller's tests, which run on CPU, do not cover them.
    """
    cuda = device_type() == "cuda"
    if name == "auto":
        runs_varlen = cuda and not context_parallel and not float32 and _has_flash_attention()
        name = "varlen" if runs_varlen else "flex" if cuda else "dense"
    if name == "dense":
        return DenseAttention.Config()
    message = f"model.attention is {name!r}, which needs CUDA; this host allows 'auto' and 'dense'"
    require(cuda, message)
    return get_attention_config(name)


def _has_flash_attention() -> bool:
    """Return whether the FlashAttention that torchtitan's varlen needs on this GPU is installed."""
    package = {"FA3": "flash_attn_interface", "FA4": "flash_attn"}
    needed = get_cuda_flash_attention_impl()
    return needed is None or find_spec(package[needed]) is not None
