"""Builds the sharded torchtitan model of one trainer rank."""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import spmd_types as spmd
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.quantization import Float8LinearConverter
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
from rl.model.qwen3 import qwen3_config
from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Box, Region, Shard, Shards
from rl.platform import device_type
from rl.training.attention import attention_config
from rl.training.config import TrainerConfig, adaptable_layers
from rl.training.logprobs import LogProbHead
from rl.training.onednn import use_onednn
from rl.training.values import ValueHead
from rl.types import Head


@titan.without_head
class HeadedModel(Qwen3Model):
    """torchtitan's Qwen3 with a head of Tiller's; FSDP wants all of it in one forward."""

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        *,
        positions: torch.Tensor,
        attention_masks: Any,
        temperature: float,
    ) -> dict[str, torch.Tensor]:
        """``logprobs`` and ``entropy`` of ``targets``, or ``values`` before these, float32 [B, L].

        From ``tokens``, ``targets`` and ``positions``, int64 [B, L].
        """
        hidden = super().forward(tokens, positions=positions, attention_masks=attention_masks)
        if isinstance(self.lm_head, ValueHead):
            return {"values": self.lm_head(hidden)}
        logprobs, entropy = self.lm_head(hidden, targets, temperature)
        return {"logprobs": logprobs, "entropy": entropy}


def build_model(
    config: TrainerConfig,
    model: ModelConfig,
    dims: ParallelDims,
    *,
    head: Head,
    seed: int,
    folder: str,
) -> HeadedModel:
    """torchtitan's Qwen3, parallelized by torchtitan, with weights that depend on ``seed``
    alone.
    """
    built = sharded_model(config, model, dims, head=head, folder=folder)
    if device_type() == "cpu":
        use_onednn()
        for module in built.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    built.to_empty(device=device_type())
    with torch.no_grad():
        built.init_weights(buffer_device=None)
        _init_parameters(built, seed)
    return built.train()


def sharded_model(
    config: TrainerConfig,
    model: ModelConfig,
    dims: ParallelDims,
    *,
    head: Head = "logprobs",
    folder: str,
) -> HeadedModel:
    """The same model on the meta device: shapes and placements, without memory."""
    shape = shape_of(model)
    if head == "values":
        shape = dataclasses.replace(shape, tie_embeddings=False)
    attention = attention_config(model.attention, context_parallel=dims.cp_enabled)
    model_config = qwen3_config(shape, fuse_qkv=model.fuse_qkv, inner_attention=attention)
    if config.float8 is not None:
        model_config = _in_float8(model_config, config.float8, compiled=config.compiles_model)
    model_config.update_from_config(config=config)
    if head == "values":
        model_config.lm_head = _value_head(model_config.lm_head)
    else:
        model_config.lm_head = _log_prob_head(model_config.lm_head, config.logits_mib)
    if config.lora is not None:
        model_config = _with_adapters(model_config, config.lora, adaptable_layers(model))
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


def _log_prob_head(head: Linear.Config, logits_mib: int) -> LogProbHead.Config:
    """A LogProbHead in place of ``head``.

    It keeps the sharding of the weight and sees to its activations itself.
    """
    weight_only = ShardingConfig(state_shardings=head.sharding_config.state_shardings)
    return LogProbHead.Config(
        in_features=head.in_features,
        out_features=head.out_features,
        param_init=head.param_init,
        sharding_config=weight_only,
        logits_mib=logits_mib,
    )


def _value_head(head: Linear.Config) -> ValueHead.Config:
    """A ValueHead in place of ``head``, whole on every tensor-parallel rank; it begins by expecting
    nothing.
    """
    return ValueHead.Config(
        in_features=head.in_features,
        out_features=1,
        param_init={"weight": nn.init.zeros_},
        sharding_config=ShardingConfig(
            state_shardings={"weight": dense_param_placement(tp=spmd.R)}
        ),
    )


def _in_float8(
    model_config: Qwen3Model.Config, float8: Float8LinearConverter.Config, *, compiled: bool
) -> Qwen3Model.Config:
    """``model_config`` with its linear layers in float8."""
    converter = dataclasses.replace(
        float8,
        # Log-probs are what RL stands on, and a token's experts should not hang on the rounding of
        # a score.
        filter_fqns=[*float8.filter_fqns, "lm_head", "router.gate"],
        model_compile_enabled=compiled,
    )
    return converter.build().convert(model_config)


def _with_adapters(
    model_config: Qwen3Model.Config, lora: LoRAConverter.Config, layers: list[str]
) -> Qwen3Model.Config:
    """``model_config`` with adapters at the layers that ``lora`` names, or all of ``layers``; the
    rest is frozen.
    """
    converter = dataclasses.replace(lora, target_modules=lora.target_modules or layers)
    return converter.build().convert(model_config)


def _tie_after_tensor_parallel(model: HeadedModel) -> None:
    """Let FSDP see one weight: torchtitan's tensor parallelism unties it, and FSDP would pad the
    two apart.
    """
    parallelize = model.parallelize

    def parallelize_and_tie(dims: ParallelDims) -> None:
        parallelize(dims)
        model.tok_embeddings.weight = model.lm_head.weight

    model.parallelize = parallelize_and_tie


def _keep_gradients_of_experts(model: Qwen3Model) -> None:
    """Mend what tensor parallelism does to gradients on their way back from torchtitan's
    experts.
    """

    def mend(_experts: nn.Module, args: tuple) -> tuple:
        x, scores, *routing = args
        wait_for_local(x)  # torch's local_map waits too, but drops the gradient
        # Each rank has a part of a score's gradient: unless added up here, DTensor scatters them
        # over uneven rows.
        return x, scores.redistribute(placements=scores.placements), *routing

    for layer in model.layers.values():
        if layer.moe_enabled:
            layer.moe.routed_experts.register_forward_pre_hook(mend)


@torch.no_grad()
def _init_parameters(model: nn.Module, seed: int) -> None:
    """torchtitan's initializers, drawn so that every layout starts from the same weights."""
    for prefix, module in model.named_modules():
        initializers = titan.initializers(module)
        for name, parameter in module.named_parameters(recurse=False):
            init = initializers.get(name, skip_param_init)
            if init is skip_param_init:
                continue
            key = f"{seed}:{canonical_fqn(f'{prefix}.{name}')}"
            full = torch.empty(parameter.shape, dtype=torch.float32)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(
                    int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
                )
                init(full)
            local_tensor(parameter).copy_(
                full[local_box(parameter).slices_in(Box.whole(full.shape))]
            )


def reshard(model: nn.Module) -> None:
    """Make the parameters shards again: FSDP keeps the head whole for a backward pass, which may
    not come.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_box(parameter: torch.Tensor) -> Box:
    """Which part of the whole parameter this rank holds."""
    if not isinstance(parameter, DTensor):
        return Box.whole(parameter.shape)
    shape, offset = local_part(parameter)
    return Box(tuple(offset), tuple(shape))


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the model itself, without adapters, by torchtitan's names."""
    return {name: parameter for name, parameter in _named(model) if not is_adapter(name)}


def named_adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of its adapters, which alone are trained where there are any."""
    return {name: parameter for name, parameter in _named(model) if is_adapter(name)}


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((canonical_fqn(name), parameter) for name, parameter in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is part of an adapter."""
    return name.endswith((".lora_a.weight", ".lora_b.weight"))


def shards_of(model: nn.Module) -> Shards:
    """This rank's live weights, without adapters; they change as the optimizer steps."""
    return {name: shard_of(name, parameter) for name, parameter in named_weights(model).items()}


def shard_of(name: str, parameter: torch.Tensor) -> Shard:
    """This rank's shard of one tensor."""
    return Shard(
        Region(name, tuple(parameter.shape), local_box(parameter)), local_tensor(parameter).detach()
    )
