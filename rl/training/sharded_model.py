"""Construction of the sharded torchtitan model of one trainer rank."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import spmd_types as spmd
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.tools.utils import set_default_dtype

from rl.compat import titan
from rl.compat.torch_internals import local_part, local_tensor, wait_for_local
from rl.errors import require_value
from rl.host.cpu_speed import faster_kernel
from rl.host.platform import device_type
from rl.model.decoder import decoder_config
from rl.model.parity import Parity, use_bitwise_kernels
from rl.model.router import Router
from rl.model.shape import ModelConfig, ModelShape, shape_of
from rl.model.shards import Box, Region, Shard, Shards
from rl.training.attention import attention_config
from rl.training.kept_logits import KeptLogits
from rl.training.logprobs import LogProbHead
from rl.training.matmul import use_kernel
from rl.training.own_layout import set_own_layout
from rl.training.trainer_config import EXPERTS, TrainerConfig, lora_layers
from rl.training.value_head import ValueHead
from rl.types import Head


@titan.without_head
class HeadedModel(Qwen3Model):
    """torchtitan's decoder with a head of Tiller; FSDP needs both in one forward."""

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        *,
        positions: torch.Tensor,
        attention_masks: Any,
        temperature: float,
        cells: torch.Tensor | None = None,
        kept: KeptLogits | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return ``logprobs`` and ``entropy`` of ``targets``, or ``values`` before them, float32
        [B, L]. ``tokens``, ``targets`` and ``positions`` are int64 [B, L]. ``cells``, int64 [R],
        are those that need a log-prob; None for all. ``kept`` are the logits that the sampling
        masks of these cells keep; None for all.
        """
        hidden = super().forward(tokens, positions=positions, attention_masks=attention_masks)
        if isinstance(self.lm_head, ValueHead):
            return {"values": self.lm_head(hidden)}
        logprobs, entropy = self.lm_head(hidden, targets, temperature, cells, kept)
        return {"logprobs": logprobs, "entropy": entropy}


def build_model(
    config: TrainerConfig,
    model: ModelConfig,
    dims: ParallelDims,
    *,
    head: Head,
    seed: int,
    folder: str,
    loads: bool = False,
    parity: Parity = "close",
) -> HeadedModel:
    """Return torchtitan's decoder, parallelized by torchtitan, with weights that depend only on
    ``seed``.

    With ``loads``, weights that come from a file are NaN: all except for adapters and value heads.
    """
    from_file = loads and bool(config.checkpoint.initial_load_path or model.hf_path)
    built = sharded_model(config, model, dims, head=head, folder=folder, parity=parity)
    if parity == "bitwise":
        use_bitwise_kernels()
    if device_type() == "cpu":
        if parity == "close":
            use_kernel(faster_kernel() if config.cpu_matmul == "auto" else config.cpu_matmul)
        for module in built.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
                if keeps_gathered(config, device_type()):
                    module.set_reshard_after_forward(False, recurse=False)
                    module.set_reshard_after_backward(False, recurse=False)
    built.to_empty(device=device_type())
    with torch.no_grad():
        built.init_weights(buffer_device=None)
        _init_parameters(built, seed, from_file=from_file)
    return built.train()


def sharded_model(
    config: TrainerConfig,
    model: ModelConfig,
    dims: ParallelDims,
    *,
    head: Head = "logprobs",
    folder: str,
    shortened: bool = False,
    parity: Parity = "close",
) -> HeadedModel:
    """Return the model of :func:`build_model` on the meta device: shapes and placements, without
    memory. With ``shortened``, it is :meth:`ModelShape.shortened`.
    """
    shape = shape_of(model).shortened() if shortened else shape_of(model)
    replay = config.router_replay
    fits = shape.num_experts > 0 or replay == "none"
    require_value(fits, "trainer.router_replay", replay, "'none' for a model without experts")
    if head == "values":
        shape = dataclasses.replace(shape, tie_embeddings=False)
    attention = attention_config(
        model.attention,
        context_parallel=dims.cp_enabled,
        float32=config.training.mixed_precision_param == "float32",
        masked=config.prompt_sharing > 1 or shape.masks_attention,
        bitwise=parity == "bitwise",
    )

    def inner_attention(layer: int) -> Any:
        if not shape.masks_attention:
            return attention
        changes = {"window": shape.window_of(layer), "cap": shape.attention_cap}
        return dataclasses.replace(attention, **changes)

    model_config = decoder_config(shape, fuse_qkv=model.fuse_qkv, inner_attention=inner_attention)
    if config.float8 is not None:
        float8 = dataclasses.replace(
            config.float8,
            # Rounding must change neither log-probs nor the choice of a token's experts.
            filter_fqns=[*config.float8.filter_fqns, "lm_head", "router.gate"],
            model_compile_enabled=config.compile.enable,
        )
        model_config = float8.build().convert(model_config)
    titan.set_layout(model_config, config)
    set_own_layout(model_config, config)
    if head == "values":
        model_config.lm_head = _value_head(model_config.lm_head)
    else:
        lm_head = model_config.lm_head
        model_config.lm_head = _log_prob_head(lm_head, config.logits_mib, shape, parity)
    if config.lora is not None:
        titan.keep_forward_with_lora(LogProbHead)
        chosen = lora_layers(config.lora, model)
        for layer in model_config.layers if EXPERTS in chosen else ():
            layer.moe.routed_experts.inner_experts.lora = (config.lora.rank, config.lora.alpha)
        linear = [name for name in chosen if name != EXPERTS]
        lora = dataclasses.replace(config.lora, target_modules=linear)
        model_config = lora.build().convert(model_config)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        built = HeadedModel(model_config)
    if built.enable_weight_tying:
        _tie_after_tensor_parallel(built)
    if dims.tp_enabled:
        _keep_gradients_of_experts(built)
    return parallelize_qwen3(  # type: ignore[no-any-return]
        built,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=folder,
    )


def _log_prob_head(
    head: Linear.Config, logits_mib: int, shape: ModelShape, parity: Parity
) -> LogProbHead.Config:
    """Return a LogProbHead in place of ``head``, with the same sharding of the weight; it handles
    the sharding of its activations.
    """
    weight_only = ShardingConfig(state_shardings=head.sharding_config.state_shardings)
    return LogProbHead.Config(
        in_features=head.in_features,
        out_features=head.out_features,
        param_init=head.param_init,
        sharding_config=weight_only,
        logits_mib=logits_mib,
        float32=shape.float32_head,
        scale=shape.logits_scale,
        cap=shape.logits_cap,
        bitwise=parity == "bitwise",
    )


def _value_head(head: Linear.Config) -> ValueHead.Config:
    """Return a ValueHead in place of ``head``, replicated over tensor-parallel ranks. Its weights
    start at 0.
    """
    replicated = {"weight": dense_param_placement(tp=spmd.R)}
    return ValueHead.Config(
        in_features=head.in_features,
        out_features=1,
        param_init={"weight": nn.init.zeros_},
        sharding_config=ShardingConfig(state_shardings=replicated),
    )


def _tie_after_tensor_parallel(model: HeadedModel) -> None:
    """Tie the embedding to the head again before FSDP: torchtitan's tensor parallelism unties them,
    and FSDP would pad them separately.
    """
    parallelize = model.parallelize

    def parallelize_and_tie(dims: ParallelDims) -> None:
        parallelize(dims)
        model.tok_embeddings.weight = model.lm_head.weight

    model.parallelize = parallelize_and_tie


def _keep_gradients_of_experts(model: Qwen3Model) -> None:
    """Correct the gradients of the inputs of torchtitan's experts under tensor parallelism."""

    def correct(_experts: nn.Module, args: tuple) -> tuple:
        x, scores, *routing = args
        wait_for_local(x)  # torch's local_map waits too, but drops the gradient
        # Each rank has a part of a score's gradient. Add the parts here; DTensor would scatter them
        # over uneven rows.
        return x, scores.redistribute(placements=scores.placements), *routing

    for layer in model.layers.values():
        if layer.moe_enabled:
            layer.moe.routed_experts.register_forward_pre_hook(correct)


@torch.no_grad()
def _init_parameters(model: nn.Module, seed: int, *, from_file: bool) -> None:
    """Run torchtitan's initializers such that every layout starts from the same weights. With
    ``from_file``, only those of weights that a file may lack: one thread draws a large model in
    minutes.
    """
    for name, module, parameter, init in initialized(model):
        if from_file and not (is_adapter(name) or isinstance(module, ValueHead | Router)):
            local_tensor(parameter).fill_(torch.nan)
            continue
        full = torch.empty(parameter.shape, dtype=torch.float32)
        draw(full, init, f"{seed}:{name}")
        local_tensor(parameter).copy_(own_part(parameter, full))


def initialized(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter, Any]]:
    """Yield name, module, parameter and initializer of all parameters that have one. A tied
    parameter comes several times; the last initializer counts.
    """
    for prefix, module in model.named_modules():
        initializers = titan.initializers(module)
        for name, parameter in module.named_parameters(recurse=False):
            if (init := initializers.get(name, skip_param_init)) is not skip_param_init:
                yield canonical_fqn(f"{prefix}.{name}"), module, parameter, init


def draw(full: torch.Tensor, init: Callable[[torch.Tensor], object], key: str) -> None:
    """Initialize ``full`` by ``init`` with random numbers that depend on ``key`` alone."""
    digest = hashlib.sha256(key.encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little"))
        init(full)


def own_part(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return the part of ``full``, shaped like ``parameter``, that this rank holds."""
    return full[local_box(parameter).slices_in(Box.whole(full.shape))]


def reshard(model: nn.Module) -> None:
    """Shard the parameters again: FSDP keeps the head gathered for a backward pass, which may not
    follow.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keeps_gathered(config: TrainerConfig, device: str) -> bool:
    """Return whether FSDP keeps parameters and gradients gathered from the first pass of a call to
    the last. It does on CPU if it shards nothing: a pass then copies and casts neither. Gradients
    are accumulated in float32.
    """
    degrees = config.parallelism
    shards = degrees.data_parallel_shard_degree * degrees.context_parallel_degree
    shards *= degrees.expert_parallel_degree
    return device == "cpu" and shards == 1 and degrees.fsdp_reshard_after_forward != "always"


def reset_passes(model: nn.Module) -> None:
    """Have FSDP forget a forward or backward pass that raised, and what it holds of the gradients
    of the passes before that one.
    """
    # before its first pass FSDP holds nothing
    if isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root is not None:
        model.reset_iter_state()


def reduce_over_replicas(model: nn.Module, reduces: bool, *, gathered: bool) -> None:
    """Set whether backward passes all-reduce gradients over replicas. Gradients of a pass without
    the all-reduce stay on the rank, and the next pass with it adds them; if parameters are kept
    ``gathered``, they stay gathered too.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(reduces, recurse=False)
            if gathered:
                module.set_requires_gradient_sync(reduces, recurse=False)


def local_box(parameter: torch.Tensor) -> Box:
    """Return the part of the whole parameter that this rank holds."""
    if not isinstance(parameter, DTensor):
        return Box.whole(parameter.shape)
    shape, offset = local_part(parameter.shape, parameter.device_mesh, parameter.placements)
    return Box(tuple(offset), tuple(shape))


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters without adapters, by torchtitan's names."""
    return {name: parameter for name, parameter in _named(model) if not is_adapter(name)}


def named_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of adapters. If the model has adapters, only they are trained."""
    return {name: parameter for name, parameter in _named(model) if is_adapter(name)}


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((canonical_fqn(name), parameter) for name, parameter in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Return whether the parameter of this name is part of an adapter."""
    return adapted_weight(name) != name


def adapted_weight(name: str) -> str:
    """Return the name of the weight that the adapter with the parameter ``name`` is added to, and
    the name itself if no adapter has it.
    """
    return re.sub(r"\.lora_[ab](\.\w+)$", r"\1", name)


def shards_of(model: nn.Module) -> Shards:
    """Return this rank's live weights without adapters; they change as the optimizer steps."""
    return {name: shard_of(name, parameter) for name, parameter in named_weights(model).items()}


def trained_shards(model: nn.Module) -> Shards:
    """Return this rank's live shards of the parameters that are trained."""
    return {name: shard_of(name, p) for name, p in _named(model) if p.requires_grad}


def gradient_shards(model: nn.Module) -> Shards:
    """Return this rank's shards of the gradient, by parameter; parameters without one are left
    out.
    """
    return {
        name: shard_of(name, parameter)._replace(tensor=local_tensor(parameter.grad))
        for name, parameter in _named(model)
        if parameter.grad is not None
    }


def shard_of(name: str, parameter: torch.Tensor) -> Shard:
    """Return this rank's shard of one tensor."""
    region = Region(name, tuple(parameter.shape), local_box(parameter))
    return Shard(region, local_tensor(parameter).detach())
