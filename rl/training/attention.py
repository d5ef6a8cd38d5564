"""Attention that trains on CPU; torchtitan's own attention does not."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import FlexAttention, GQAttention, create_attention_mask
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.tools.utils import get_cuda_flash_attention_impl

from rl.errors import require
from rl.host.platform import device_type
from rl.model.decoder import Attention
from rl.training.documents import Documents
from rl.training.packing import MicroBatchLimits
from rl.training.trainer_config import TrainerConfig

FLASH_ATTENTION = {"FA3": ["flash_attn_interface"], "FA4": ["flash_attn", "flash_attn.cute"]}
"""Modules of the FlashAttention that torchtitan's varlen needs, by its name."""


TILE = 16
"""Number of queries and of keys whose products vLLM's batch-invariant generators sum together."""
TILES = {"BLOCK_M": TILE, "BLOCK_N": TILE, "IS_DIVISIBLE": False, "FORCE_USE_FLEX_ATTENTION": True}
"""Options with which these generators call flex attention."""


class MaskedAttention(FlexAttention):
    """torchtitan's flex attention with the mask of the layer's window, and with sinks."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        window: int = 0
        """Number of tokens that a token attends to, itself included; 0 for all before it."""
        cap: float = 0.0
        """Bound of the products of queries and keys; 0 for none."""
        bitwise: bool = False
        """Whether generators compute the same bits."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.window = config.window
        self.cap = config.cap

    def forward(  # type: ignore[override]
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return the attention output [B, L, N, H] of q [B, L, N, H], k and v [B, L, N_kv, H].
        ``attention_masks`` are those of the function below, and ``sinks`` logits [N] of no value.
        """
        mask = (
            attention_masks[self.window] if isinstance(attention_masks, dict) else attention_masks
        )
        return self.attend((q_BLNH, k_BLNH, v_BLNH), mask, sinks, **options)

    def attend(self, qkv: Any, mask: Any, sinks: torch.Tensor | None, **options: Any) -> Any:
        """Return the output of ``forward`` with the mask of this layer. No test covers CUDA."""
        if sinks is not None:
            options["out_transform"] = lambda out, lse: (
                out * torch.sigmoid(lse - sinks).unsqueeze(-1).type_as(out)
            )
        if self.cap:
            options["score_mod"] = lambda score, *_: self.cap * torch.tanh(score / self.cap)
        return super().forward(*qkv, attention_masks=mask, **options)


class DenseAttention(MaskedAttention):
    """Attention with a dense boolean mask. Memory is quadratic in the length: keep rows short.

    It is a subclass of FlexAttention, so that torchtitan shards and wraps it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MaskedAttention.Config):
        """Config that torchtitan builds this class of."""

    def attend(
        self,
        qkv: Any,
        mask: "torch.Tensor | Documents",
        sinks: torch.Tensor | None,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Return the output of ``forward``; the mask is bool [B, 1, L, L] (True: attend), or the
        documents of the rows.
        """
        if isinstance(mask, Documents):
            return mask.attend(qkv, scale, self.window, sinks)
        q, k, v = (heads.transpose(1, 2) for heads in qkv)
        if self.cap:
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            return capped_attention(q, k, v, mask, factor, self.cap).transpose(1, 2)
        if sinks is not None:  # one more key of logit 0, to which the mask adds the sink
            k, v = (F.pad(heads, (0, 0, 0, 1)) for heads in (k, v))
            added = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            shape = (*q.shape[:3], -1)
            mask = torch.cat([added.expand(shape), sinks.view(-1, 1, 1).expand(shape)], dim=-1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


def capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Return the attention output [B, N, L, H] of q [B, N, L, H], k and v [B, N_kv, L, H] with a
    bool mask [B, 1, L, L] (True: attend). Products are bounded to cap * tanh(product / cap).
    """
    k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
    scores = cap * torch.tanh((q @ k.mT).float() * (scale / cap))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).type_as(v) @ v


def tree_mask(positions: torch.Tensor, window: int = 0) -> Callable[..., torch.Tensor]:
    """Return a mask function of flex attention for documents with branches, limited to the last
    ``window`` positions unless that is 0.

    A document starts at each 0 of ``positions`` [B, L]. At each other position that is not one more
    than the position before, a branch of the document starts: its cells attend to their own branch,
    and to the cells of the document's beginning whose positions precede the branch.

    Tiller's tests run the mask with dense attention only: flex attention needs CUDA.
    """
    cells = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    document = (positions == 0).cumsum(1)
    starts = positions != F.pad(positions[:, :-1] + 1, (1, 0), value=-1)
    start = torch.where(starts, cells, 0).cummax(1).values
    origin = positions.gather(1, start)  # position at which the branch starts
    limit = window or 1 << 30  # not the length of the rows, which would be a constant of a graph

    def attends(
        b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        same = start[b, query] == start[b, key]
        trunk = (origin[b, key] == 0) & (positions[b, key] < origin[b, query])
        inside = document[b, query] == document[b, key]
        near = positions[b, query] - positions[b, key] < limit
        return inside & near & (query >= key) & (same | trunk)

    return attends


def attention_masks(
    model: Qwen3Model, positions: torch.Tensor, config: TrainerConfig | None = None
) -> Any:
    """Return the masks with which the layers of ``model`` attend causally within the documents of
    ``positions`` [B, L], which may have branches if ``config`` shares prompts. For a model with
    attention windows, the result is {window: mask}, with the window 0 for layers without one.

    The result is :class:`Documents` in place of a dense mask with a ``config`` of
    :func:`computes_documents`.
    """
    configs = [attention.inner_attention for attention in attentions_of(model.config)]
    if config is not None and computes_documents(config, model.config):
        return Documents(positions, configs[0].bitwise)
    trees = config is not None and config.prompt_sharing > 1
    masked = [inner for inner in configs if isinstance(inner, MaskedAttention.Config)]
    windows = {inner.window for inner in masked}
    dense = isinstance(configs[0], DenseAttention.Config)
    bitwise = any(inner.bitwise for inner in masked)
    if not dense and not trees and not bitwise and not any(windows):
        return model.get_attention_masks(positions)
    create = dense_tree_mask if dense else partial(flex_tree_mask, ordered=bitwise)
    masks = {window: create(positions, window) for window in windows}
    return masks if any(windows) else masks[0]


def attentions_of(model: Qwen3Model.Config) -> list[GQAttention.Config]:
    """Return the configs of attention of the layers that have it, in order."""
    return [layer.attention for layer in model.layers if layer.attention is not None]


def dense_tree_mask(positions: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Return the values of :func:`tree_mask`, bool [B, 1, L, L]."""
    rows, cells = (torch.arange(size, device=positions.device) for size in positions.shape)
    attends = tree_mask(positions, window)
    return attends(rows.view(-1, 1, 1), rows, cells.view(-1, 1), cells).unsqueeze(1)


def flex_tree_mask(positions: torch.Tensor, window: int, *, ordered: bool = False) -> Any:
    """Return :func:`tree_mask` as a block mask of flex attention, which needs CUDA to run. Flex
    attention sums blocks without masked pairs last, unless ``ordered``.
    """
    rows, length = positions.shape
    attends = tree_mask(positions, window)
    options: dict[str, Any] = {"device": positions.device}
    if ordered:
        options["separate_full_blocks"] = False
    return create_attention_mask(attends, rows, None, length, length, **options)


def computes_documents(config: TrainerConfig, model: Qwen3Model.Config) -> bool:
    """Return whether a trainer of ``model`` computes the attention of documents, without a mask of
    whole rows: dense attention without windows, sinks, bounds or context parallelism, or that of
    bitwise parity.
    """
    attentions = attentions_of(model)
    is_plain = all(
        isinstance(attention.inner_attention, DenseAttention.Config)
        and not attention.inner_attention.window
        and not attention.inner_attention.cap
        and not (isinstance(attention, Attention.Config) and attention.sinks)
        for attention in attentions
    )
    is_plain = is_plain and config.parallelism.context_parallel_degree == 1
    first = attentions[0].inner_attention
    return is_plain or (isinstance(first, DenseAttention.Config) and first.bitwise)


def micro_batch_limits(config: TrainerConfig, model: Qwen3Model.Config) -> MicroBatchLimits:
    """Return the limits of the micro-batches of a trainer of ``model``."""
    inner = model.first_attention.inner_attention
    dense = isinstance(inner, DenseAttention.Config)
    kind = "dense" if dense else "flex" if isinstance(inner, FlexAttention.Config) else "varlen"
    limits = MicroBatchLimits.of(config, kind)
    in_tiles = kind == "flex" and isinstance(inner, MaskedAttention.Config) and inner.bitwise
    one_row = limits.one_row or computes_documents(config, model)
    return replace(limits, align=TILE if in_tiles else 1, one_row=one_row)


def attention_config(
    name: str,
    *,
    context_parallel: bool = False,
    float32: bool = False,
    masked: bool = False,
    bitwise: bool = False,
) -> FlexAttention.Config | Any:
    """Return the torchtitan config of attention ``name``.

    ``auto`` is dense on CPU. On CUDA it is varlen, or flex if torchtitan's varlen cannot run: with
    context parallelism, for documents with branches, windows or sinks (``masked``), for ``bitwise``
    parity, without the FlashAttention that the GPU needs, or for a trainer that computes in
    ``float32``, which varlen would round to bfloat16.

    varlen and flex run on CUDA only; Tiller's tests, which run on CPU, do not cover them.
    """
    cuda = device_type() == "cuda"
    if name == "auto":
        needs_flex = context_parallel or float32 or masked or bitwise
        modules = FLASH_ATTENTION.get(get_cuda_flash_attention_impl(), []) if cuda else []
        runs_varlen = cuda and not needs_flex and all(map(find_spec, modules))
        name = "varlen" if runs_varlen else "flex" if cuda else "dense"
    if name == "dense":
        return DenseAttention.Config(bitwise=bitwise)
    message = f"model.attention is {name!r}, which needs CUDA; this host allows 'auto' and 'dense'"
    require(cuda, message)
    if name == "flex":
        return MaskedAttention.Config(bitwise=bitwise, kernel_options=TILES if bitwise else {})
    return get_attention_config(name)
