"""torchtitan's Qwen3 inside vLLM: the trainer's own model file, with paged attention, kernels and
local shards.

Tensor parallelism is the table of ``rl.model.tp_plan`` and vLLM's collectives: a parameter is made
at its local shape, row-cut layers, experts and the embedding add up over the ranks, and every rank
gets all logits. Expert parallelism gives each rank the tokens of its own experts.

The tests run this on CPU, eager. CUDA and ``torch.compile`` take the same lines and are not covered
by them.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.token_dispatcher import LocalDispatchMetadata, LocalTokenDispatcher
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.protocols.module import Module
from vllm.compilation.decorators import support_torch_compile
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.registry import ModelRegistry

from rl.compat import titan
from rl.compat.vllm_kernels import can_pack
from rl.generation.kernels import KernelRoPE, pack, unpack, use_kernels
from rl.model.qwen3 import qwen3_config
from rl.model.shape import ModelShape
from rl.model.shards import Layout, local_shapes, local_shards
from rl.model.tp_plan import generator_layout

ARCHITECTURE = "TillerQwen3ForCausalLM"
LOAD_FORMAT = "tiller"


class PagedAttention(Module):
    """vLLM's attention over its KV cache, where torchtitan expects an inner attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer: int
        n_heads: int
        """Query heads of this rank."""
        n_kv_heads: int
        """Key and value heads of this rank."""
        head_dim: int

    def __init__(self, config: Config):
        super().__init__()
        vllm_config = get_current_vllm_config()
        with _device(
            vllm_config
        ):  # its scale buffers must be real although the model is built on meta
            self.attention = Attention(
                config.n_heads,
                config.head_dim,
                config.head_dim**-0.5,
                num_kv_heads=config.n_kv_heads,
                cache_config=vllm_config.cache_config,
                prefix=f"layers.{config.layer}.attention",
            )

    def forward(
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **_
    ) -> torch.Tensor:
        """All sequences lie end to end in one row (B = 1); vLLM knows where each begins."""
        out = self.attention(*(heads.squeeze(0).flatten(1) for heads in (q_BLNH, k_BLNH, v_BLNH)))
        return out.view(q_BLNH.shape)


class OwnExperts(LocalTokenDispatcher):
    """Gives the rank's own experts their tokens, where the ranks divide whole experts among
    them.
    """

    def __init__(self, shape: ModelShape, *, tp: int, rank: int):
        super().__init__(
            LocalTokenDispatcher.Config(
                num_experts=shape.num_experts, top_k=shape.experts_per_token
            )
        )
        held = shape.num_experts // tp
        self.own = slice(rank * held, (rank + 1) * held)

    def dispatch(self, x_TD: torch.Tensor, *routing: torch.Tensor) -> tuple:
        """As torchtitan's, of the own experts alone; asks the device how many tokens these have."""
        sorted_ND, counts_E, metadata = super().dispatch(x_TD, *routing)
        first = int(counts_E[: self.own.start].sum())
        count = int(counts_E[self.own].sum())
        mine = slice(first, first + count)
        own_metadata = LocalDispatchMetadata(
            token_indices_experts_sorted_N=metadata.token_indices_experts_sorted_N[mine],
            topk_scores_experts_sorted_N=metadata.topk_scores_experts_sorted_N[mine],
        )
        return sorted_ND[mine], counts_E[self.own], own_metadata


def local_model(vllm_config: VllmConfig) -> Qwen3Model:
    """This rank's shard of the model that ``vllm_config.additional_config`` describes.

    Parameters are NaN until weights are pushed, so that nothing generated without them can pass for
    real.
    """
    asked: Any = vllm_config.additional_config
    shape = ModelShape(**asked["shape"])
    tp = vllm_config.parallel_config.tensor_parallel_size
    rank = get_tp_group().rank_in_group
    heads = {"n_heads": shape.n_heads // tp, "n_kv_heads": max(1, shape.n_kv_heads // tp)}
    config = qwen3_config(
        dataclasses.replace(shape, **heads),
        fuse_qkv=asked["fuse_qkv"],
        inner_attention=lambda layer: PagedAttention.Config(
            layer=layer, head_dim=shape.head_dim, **heads
        ),
    )
    use_kernels(
        config,
        compiled=not vllm_config.model_config.enforce_eager,
        packed=_device(vllm_config).type == "cpu" and can_pack(vllm_config.model_config.dtype),
    )
    with torch.device("meta"):
        model = config.build()
    layouts = generator_layout(
        shape, fuse_qkv=asked["fuse_qkv"], tp=tp, expert_parallel=asked["expert_parallel"]
    )
    with _device(vllm_config):
        _make_parameters(model, layouts, rank=rank, dtype=vllm_config.model_config.dtype)
    _make_rope_cache(model, _device(vllm_config))
    if tp > 1:
        _add_collectives(model)
    if asked["expert_parallel"]:
        for layer in model.layers.values():
            layer.moe.routed_experts.token_dispatcher = OwnExperts(shape, tp=tp, rank=rank)
    pack(model)
    return titan.without_head(model)  # vLLM asks for the logits of the last positions only


def _device(vllm_config: VllmConfig) -> torch.device:
    return torch.device(str(vllm_config.device_config.device))


def _make_parameters(
    model: Qwen3Model, layouts: tuple[Layout, ...], *, rank: int, dtype: Any
) -> None:
    """Replace every meta parameter by this rank's shard of it, filled with NaN."""
    # All ranks' tensors have the shapes of the first's, as collectives want: what a rank does not
    # own of them is zero.
    tensors = {
        name: torch.zeros(shape, dtype=dtype) for name, shape in local_shapes(layouts[0]).items()
    }
    for shard in local_shards(tensors, layouts[rank]):
        shard.tensor.fill_(torch.nan)
    for name, _ in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_parameter(
            leaf, nn.Parameter(tensors[name], requires_grad=False)
        )
    if model.enable_weight_tying:
        model.lm_head.weight = model.tok_embeddings.weight


def _make_rope_cache(model: Qwen3Model, device: torch.device) -> None:
    """One float32 cache for all layers: they rotate alike, and at long context a copy each is
    gigabytes.
    """
    ropes = [layer.attention.rope for layer in model.layers.values()]
    ropes[0].init_states(buffer_device=device)
    if isinstance(ropes[0], KernelRoPE):
        ropes[0].halve_cache()
    for rope in ropes[1:]:
        rope.cache = ropes[0].cache


def _add_collectives(model: Qwen3Model) -> None:
    """Sum over the ranks what each computed a part of: the embedding and the layers cut by input
    features.
    """

    def add_up(_module: nn.Module, _args: tuple, out: torch.Tensor) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(out)

    model.tok_embeddings.tp_group = (
        get_tp_group().device_group
    )  # torchtitan's own vocab-parallel lookup
    model.tok_embeddings.register_forward_hook(add_up)
    for layer in model.layers.values():
        layer.attention.wo.register_forward_hook(add_up)
        (layer.moe if layer.moe_enabled else layer.feed_forward.w2).register_forward_hook(add_up)


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0})
class HiddenStates(nn.Module):
    """Everything before the output head: the part that vLLM compiles where ``enforce_eager`` is
    off.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.model = local_model(vllm_config)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, dim] of the token ids [T] at ``positions`` [T] of their sequences."""
        return self.model(input_ids.unsqueeze(0), positions.unsqueeze(0)).squeeze(0)


class TillerQwen3ForCausalLM(nn.Module):
    """The interface that vLLM's model runner calls."""

    is_text_generation_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.tp = vllm_config.parallel_config.tensor_parallel_size
        self.hidden_states = HiddenStates(vllm_config=vllm_config, prefix=prefix)

    @property
    def titan(self) -> Qwen3Model:
        """The torchtitan model, whose parameter names are the trainer's."""
        return self.hidden_states.model

    def weights_changed(self) -> None:
        """To be called after parameters were written."""
        pack(self.titan)

    def weights_away(self) -> None:
        """To be called when nobody will ask for anything before ``weights_changed``."""
        unpack(self.titan)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.titan.tok_embeddings(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: None = None,
    ) -> torch.Tensor:
        return self.hidden_states(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab_size] on every rank: each samples for itself, from the same numbers."""
        logits = self.titan.lm_head(hidden_states)
        if self.tp == 1:
            return logits
        return tensor_model_parallel_all_gather(logits)[:, : self.titan.config.vocab_size]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        raise NotImplementedError("weights are pushed into the parameters, never loaded by vLLM")


class NoWeights(BaseModelLoader):
    """Leaves the parameters as they were made: the trainer pushes them later."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        pass


def register() -> None:
    """Make ARCHITECTURE and LOAD_FORMAT known to vLLM in this process."""
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, TillerQwen3ForCausalLM)
        register_model_loader(LOAD_FORMAT)(NoWeights)
