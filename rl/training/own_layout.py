"""Sharding of parameters that torchtitan's Qwen3 lacks."""

import spmd_types as spmd
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    rowwise_config,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from rl.model.decoder import POST_NORMS, Layer
from rl.model.delta_net import DeltaLayer, GatedDeltaNet
from rl.model.experts import ClampedExperts
from rl.training.trainer_config import TrainerConfig


def set_own_layout(model: Qwen3Model.Config, config: TrainerConfig) -> None:
    """Set how parameters that torchtitan's Qwen3 lacks are sharded."""
    sequences = config.parallelism.enable_sequence_parallel
    for layer in model.layers:
        for name in POST_NORMS if isinstance(layer, Layer.Config) else ():
            if (norm := getattr(layer, name)) is not None:
                norm.sharding_config = layer.attention_norm.sharding_config
        if isinstance(layer, DeltaLayer.Config):
            _set_delta_layout(layer.delta_net, sequences)
        else:
            placements = layer.attention.sharding_config.state_shardings
            placements["sinks"] = dense_param_placement(tp=spmd.S(0))
        if layer.moe:
            replicated = {"expert_bias": dense_param_placement(tp=spmd.R)}
            layer.moe.router.sharding_config = ShardingConfig(state_shardings=replicated)
        if layer.moe and layer.moe.shared_experts:
            _set_shared_gate_layout(layer.moe.shared_experts.gate, sequences)
        if layer.moe and isinstance(layer.moe.routed_experts.inner_experts, ClampedExperts.Config):
            set_moe_sharding_config(
                layer.moe,
                enable_ep=config.parallelism.expert_parallel_degree > 1,
                enable_sp=sequences,
                expert_param_layout={
                    "gate_up_EDG": spmd.S(2),
                    "gate_up_bias": spmd.S(1),
                    "down_EFD": spmd.S(1),
                    "down_bias": spmd.R,
                },
            )


def _set_delta_layout(net: GatedDeltaNet.Config, sequences: bool) -> None:
    """Divide whole heads among the ranks. ``sequences`` is whether sequences are divided outside of
    attention and feed-forward.
    """
    heads = dense_activation_placement(tp=spmd.S(2))
    rows = dense_param_placement(tp=spmd.S(0))
    whole = dense_activation_placement(tp=spmd.R)
    outside = dense_activation_placement(tp=spmd.I)
    if sequences:
        outside = dense_sequence_parallel_placement()
    for part in (net.qkv, net.z, net.a, net.b):
        part.sharding_config = colwise_config()
    net.conv.sharding_config = ShardingConfig(state_shardings={"weight": rows})
    net.wo.sharding_config = rowwise_config(output_sp=sequences)
    net.norm.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        in_src_shardings={"x": heads, "gate": heads},
        out_src_shardings=heads,
    )
    inputs = {"qkv_BLD": heads, "decay_BLN": heads, "beta_BLN": heads, "weight": rows}
    net.inner.sharding_config = ShardingConfig(
        in_src_shardings=inputs,
        out_src_shardings=heads,
        local_map=LocalMapConfig(in_grad_placements=tuple(inputs.values())),
    )
    net.sharding_config = ShardingConfig(
        state_shardings={"A_log": rows, "dt_bias": rows},
        in_src_shardings={"x_BLD": outside},
        in_dst_shardings={"x_BLD": whole},
    )


def _set_shared_gate_layout(gate: Linear.Config, sequences: bool) -> None:
    """Replicate the gate of a shared expert, whose output is that of all tokens, or with
    ``sequences`` that of a part of them.
    """
    whole = dense_activation_placement(tp=spmd.R)
    gate.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        out_src_shardings=whole,
        out_dst_shardings=dense_sequence_parallel_placement() if sequences else whole,
    )
