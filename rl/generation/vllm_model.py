"""torchtitan's Qwen3 inside vLLM: the trainer's own model with paged attention, vLLM's kernels and
local shards.

Tensor parallelism follows the table of ``rl.model.tp_plan`` with vLLM's collectives: parameters
have their local shapes; the outputs of row-parallel layers, experts and the embedding are summed
over the ranks; every rank gets all logits. With expert parallelism each rank processes the tokens
of its own experts.

The tests run this eagerly on CPU. They do not cover CUDA and ``torch.compile``.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.protocols.module import Module
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationMode, ModelConfig, VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.registry import ModelRegistry

from rl.compat import titan
from rl.compat.vllm_kernels import can_pack
from rl.generation.adapter_bank import AdapterBank
from rl.generation.bitwise_attention import BitwiseAttention
from rl.generation.delta_cache import CachedDelta, state_dtypes, state_shapes
from rl.generation.expert_records import keep_choices
from rl.generation.generator_config import BankConfig
from rl.generation.kernels import KernelRoPE, pack, unpack, use_kernels
from rl.model.decoder import decoder_config, float32_logits
from rl.model.delta_net import heads_of
from rl.model.experts import OwnExperts
from rl.model.parity import use_bitwise_kernels
from rl.model.rotary import RotaryEmbedding
from rl.model.shape import ModelShape
from rl.model.shards import Layout, local_shapes
from rl.model.tp_plan import generator_layout

ARCHITECTURE = "TillerForCausalLM"
HYBRID_ARCHITECTURE = "TillerHybridForCausalLM"
"""Architecture of models of which some layers keep a state in place of keys and values."""
LOAD_FORMAT = "tiller"
DELTA_HEADS = ("delta_key_heads", "delta_value_heads")
SAMPLED_TOGETHER = 1024
"""Number of words that Model Runner V2 compares at once when it samples."""


class PagedAttention(Module):
    """vLLM's attention over its KV cache as torchtitan's inner attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer: int
        n_heads: int
        """Number of query heads of this rank."""
        n_kv_heads: int
        """Number of key and value heads of this rank."""
        head_dim: int
        scale: float
        """Factor of the products of queries and keys."""
        window: int
        """Number of tokens that a token attends to; 0 for all before it."""
        sinks: bool
        cap: float
        """Bound of the products of queries and keys; 0 for none."""
        bitwise: bool
        """Whether outputs have the bits of the trainer."""

    def __init__(self, config: Config):
        super().__init__()
        vllm_config = get_current_vllm_config()
        more: dict[str, Any] = {}
        with _device(vllm_config):  # the model is built on meta, but the scale buffers must be real
            if config.sinks:
                dtype: Any = vllm_config.model_config.dtype
                more["sinks"] = self.sinks = torch.zeros(config.n_heads, dtype=dtype)
            if config.bitwise and _device(vllm_config).type == "cpu":
                more["attn_backend"] = BitwiseAttention
            self.attention = Attention(
                config.n_heads,
                config.head_dim,
                config.scale,
                num_kv_heads=config.n_kv_heads,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=config.window or None,
                logits_soft_cap=config.cap or None,
                prefix=f"layers.{config.layer}.attention",
                **more,
            )

    def forward(
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **_
    ) -> torch.Tensor:
        """Attend within the sequences, which are concatenated in one row (B = 1)."""
        out = self.attention(*(heads.squeeze(0).flatten(1) for heads in (q_BLNH, k_BLNH, v_BLNH)))
        return out.view(q_BLNH.shape)


def local_model(vllm_config: VllmConfig) -> Qwen3Model:
    """Return this rank's shard of the model that ``vllm_config.additional_config`` describes.

    Parameters are 0: vLLM samples from them while it starts, and keeps the keys and values.
    """
    options: Any = vllm_config.additional_config
    shape = ModelShape(**options["shape"])
    device = _device(vllm_config)
    dtype: Any = vllm_config.model_config.dtype
    tp = vllm_config.parallel_config.tensor_parallel_size
    rank = get_tp_group().rank_in_group
    bitwise = options["parity"] == "bitwise"
    heads = {"n_heads": shape.n_heads // tp, "n_kv_heads": max(1, shape.n_kv_heads // tp)}
    delta_heads = {name: getattr(shape, name) // tp for name in DELTA_HEADS}
    config = decoder_config(
        dataclasses.replace(shape, **heads, **delta_heads),
        fuse_qkv=options["fuse_qkv"],
        inner_attention=lambda layer: PagedAttention.Config(
            layer=layer,
            head_dim=shape.head_dim,
            scale=shape.attention_scale or shape.head_dim**-0.5,
            window=shape.window_of(layer),
            sinks=shape.sinks,
            cap=shape.attention_cap,
            bitwise=bitwise,
            **heads,
        ),
        inner_delta=lambda layer: CachedDelta.Config(layer=layer, heads=heads_of(shape)),
    )
    packed = device.type == "cpu" and can_pack(dtype)
    compiled = vllm_config.compilation_config.mode != CompilationMode.NONE
    if bitwise:
        use_bitwise_kernels()
    else:
        joined = options["adapters"] is None  # those of w1 and w3 are separate layers
        use_kernels(config, compiled=compiled, packed=packed, joined=joined)
    with torch.device("meta"):
        model = config.build()
    layouts = generator_layout(
        shape, fuse_qkv=options["fuse_qkv"], tp=tp, expert_parallel=options["expert_parallel"]
    )
    with device:
        _make_parameters(model, layouts[0], dtype=dtype)
    _make_rope_cache(model, device)
    if tp > 1:
        _add_collectives(model)
    for layer in model.layers.values() if shape.num_experts else ():
        layer.moe.tokens_per_expert_E = None  # counts of training, still on meta
    if options["expert_parallel"]:
        for layer in model.layers.values():
            layer.moe.routed_experts.token_dispatcher = OwnExperts(shape, ranks=tp, rank=rank)
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    model.adapters = None
    if options["adapters"] is not None:
        bank = BankConfig(**options["adapters"])
        model.adapters = AdapterBank(model, layouts[rank], bank, tokens=tokens)
    if options["record_experts"]:
        with device:
            model.chosen_experts = keep_choices(model, shape, tokens=tokens)
    pack(model)
    return titan.without_head(model)  # vLLM computes the logits of the last positions only


def _device(vllm_config: VllmConfig) -> torch.device:
    return torch.device(str(vllm_config.device_config.device))


def _make_parameters(model: Qwen3Model, layout: Layout, *, dtype: Any) -> None:
    """Replace every meta parameter by zeros in the shapes of rank 0: collectives need the same
    shapes on all ranks, with zeros beyond a rank's shard. Sinks are the tensors that vLLM has.
    """
    shapes = local_shapes(layout)
    for name, _ in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        parent = model.get_submodule(module)
        zeros = torch.zeros(shapes[name], dtype=dtype)
        if leaf == "sinks":
            zeros = parent.inner_attention.sinks
        parent.register_parameter(leaf, nn.Parameter(zeros, requires_grad=False))
    if model.enable_weight_tying:
        model.lm_head.weight = model.tok_embeddings.weight


def attentions_of(model: Qwen3Model) -> list[Any]:
    """Return the attention of the layers that have it, in order."""
    attentions = (layer.attention for layer in model.layers.values())
    return [attention for attention in attentions if attention is not None]


def _make_rope_cache(model: Qwen3Model, device: torch.device) -> None:
    """Share one float32 cache among the layers that rotate alike: at long context a copy for each
    layer takes gigabytes.
    """
    first: dict[str, RotaryEmbedding] = {}
    for attention in attentions_of(model):
        rope = attention.rope
        if (known := first.setdefault(repr(rope.config), rope)) is not rope:
            rope.cache = known.cache
            continue
        rope.init_states(buffer_device=device)
        if isinstance(rope, KernelRoPE):
            half = rope.config.dim // 2  # torchtitan has each cosine and each sine twice
            rope.cache = rope.cache[:, half:-half].contiguous()


def _add_collectives(model: Qwen3Model) -> None:
    """Sum the outputs of the embedding and of row-parallel layers over the ranks."""

    def all_reduce(_module: nn.Module, _args: tuple, out: torch.Tensor) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(out)

    # torchtitan's own vocab-parallel lookup
    model.tok_embeddings.tp_group = get_tp_group().device_group
    model.tok_embeddings.register_forward_hook(all_reduce)
    for layer in model.layers.values():
        last = layer.moe if layer.moe_enabled else layer.feed_forward.w2
        last.register_forward_hook(all_reduce)
        mixer = layer.delta_net if layer.attention is None else layer.attention
        mixer.wo.register_forward_hook(all_reduce)


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0})
class HiddenStates(nn.Module):
    """The model without its output head: the part that vLLM compiles and captures unless
    ``enforce_eager``. Experts on CUDA are captured, not compiled.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.model = local_model(vllm_config)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T, dim] of token ids [T] at ``positions`` [T] of their
        sequences.
        """
        hidden = self.model(input_ids.unsqueeze(0), positions.unsqueeze(0)).squeeze(0)
        adapters = self.model.adapters
        return hidden if adapters is None else adapters.with_head(hidden)


class TillerForCausalLM(nn.Module):
    """The model as vLLM's model runner calls it."""

    is_text_generation_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.tp = vllm_config.parallel_config.tensor_parallel_size
        self.hidden_states = HiddenStates(vllm_config=vllm_config, prefix=prefix)
        words = self.titan.config.vocab_size
        shape = vllm_config.additional_config["shape"]
        dtype: Any = vllm_config.model_config.dtype
        self.float32_head = shape["float32_head"] and dtype != torch.float32
        self.logits_scale = shape["logits_scale"]
        self.logits_cap = shape["logits_cap"]
        self.may_sample_no_word = vllm_config.use_v2_model_runner and words < SAMPLED_TOGETHER

    @property
    def titan(self) -> Qwen3Model:
        """The torchtitan model, with the trainer's parameter names."""
        return self.hidden_states.model

    @property
    def chosen_experts(self) -> torch.Tensor | None:
        """Experts of the newest forward pass, [tokens, layers, experts per token]; None if this
        rank records none.
        """
        return getattr(self.titan, "chosen_experts", None)

    @property
    def adapters(self) -> AdapterBank | None:
        """Adapters beside the parameters; None if this generator has none."""
        return self.titan.adapters

    def weights_changed(self) -> None:
        """Update copies of the parameters. Call this after each change of the parameters."""
        pack(self.titan)
        for attention in attentions_of(self.titan):
            inner = attention.inner_attention
            if hasattr(inner, "sinks"):  # some of vLLM's backends copy them
                inner.attention.impl.process_weights_after_loading(inner.sinks.dtype)

    def weights_away(self) -> None:
        """Free copies of the parameters. The model cannot run until ``weights_changed``."""
        unpack(self.titan)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.titan.tok_embeddings(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: None) -> torch.Tensor:
        return self.hidden_states(input_ids, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, vocab_size] on every rank: each samples from the same numbers."""
        head = self.titan.lm_head
        added = None
        if self.adapters is not None:
            hidden_states, added = self.adapters.without_head(hidden_states)
        if self.float32_head:
            logits = float32_logits(hidden_states, head.weight)
        else:
            logits = head(hidden_states)
        if added is not None:
            logits = logits + added
        if self.logits_scale != 1.0:
            logits = logits.float() / self.logits_scale
        if self.logits_cap:
            logits = self.logits_cap * (logits.float() / self.logits_cap).tanh()
        if self.tp > 1:
            logits = tensor_model_parallel_all_gather(logits)[:, : self.titan.config.vocab_size]
        return first_word_if_nan(logits) if self.may_sample_no_word else logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        raise NotImplementedError("weights are pushed into the parameters, never loaded by vLLM")


class TillerHybridForCausalLM(TillerForCausalLM, HasInnerState, IsHybrid):
    """The model, if some of its layers keep a state; vLLM asks what room the states take."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        return state_shapes(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return MambaStateCopyFuncCalculator.gated_delta_net_state_copy_func()


def first_word_if_nan(logits: torch.Tensor) -> torch.Tensor:
    """Return ``logits`` [N, vocab_size] with infinity for the first word in rows that have a NaN.

    That word is then sampled, and its log-prob is NaN. Of NaNs alone Model Runner V2 may sample a
    number beyond a small vocabulary on CUDA, which ends the process.
    """
    first = torch.full_like(logits[:1], -torch.inf)
    first[:, 0] = torch.inf
    return torch.where(logits.isnan().any(1, keepdim=True), first, logits)


class NoWeights(BaseModelLoader):
    """Loader that leaves the parameters unchanged: the trainer pushes them later."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        pass


def register() -> None:
    """Register the architectures and LOAD_FORMAT with vLLM in this process."""
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, TillerForCausalLM)
        ModelRegistry.register_model(HYBRID_ARCHITECTURE, TillerHybridForCausalLM)
        register_model_loader(LOAD_FORMAT)(NoWeights)
