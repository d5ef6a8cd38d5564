"""Low-rank adapters (LoRA, arXiv:2106.09685) of the weights of grouped experts."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torchtitan.distributed.parallel_dims import MeshAxisName, SpmdLayout
from torchtitan.models.common.moe_sharding import expert_param_placement_dense
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

ALIGNMENT = 8
"""Divisor of ranks that torch's grouped products need."""

Groups = torch.Tensor | list[int]
"""Groups of rows that are sorted by expert: their ends on the device, int32 [experts], or their
sizes."""


class Factors(Module):
    """A [experts, in, rank] or B [experts, out, rank] of each weight, by the name of the weight.

    The rank is last: FSDP cuts the dimension before it if there are more ranks than experts.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        shapes: Mapping[str, tuple[int, ...]]

    def __init__(self, config: Config):
        super().__init__()
        for name, shape in config.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def add_adapters(experts: Any, config: Any) -> None:
    """Add the factors ``lora_a`` and ``lora_b`` of each weight to ``experts``, as torchtitan adds
    them to a linear layer. ``config.lora`` is the rank and alpha of the adapters.
    """
    rank, alpha = config.lora
    experts._lora_scaling = alpha / rank
    weights = {name: param for name, param in experts.named_parameters() if param.ndim == 3}
    layouts = config.sharding_config.state_shardings
    for side, dim in (("lora_a", experts.in_dim), ("lora_b", 3 - experts.in_dim)):
        rows = {name: weight.shape[dim] for name, weight in weights.items()}
        bounds = {name: count**-0.5 for name, count in rows.items()}
        drawn = {name: partial(nn.init.uniform_, a=-end, b=end) for name, end in bounds.items()}
        shardings = {name: _layout(layouts[name], dim) for name in rows}
        factors = Factors.Config(
            shapes={name: (config.num_experts, count, rank) for name, count in rows.items()},
            param_init=drawn if side == "lora_a" else dict.fromkeys(rows, nn.init.zeros_),
            sharding_config=ShardingConfig(state_shardings=shardings),
        )
        setattr(experts, side, factors.build())


def _layout(weight: SpmdLayout, dim: int) -> SpmdLayout:
    """Return the layout of a factor whose rows are dimension ``dim`` of a weight."""
    cut = weight.axis_types.get(MeshAxisName.TP)
    if cut is None:  # ranks have whole experts
        return weight
    return expert_param_placement_dense(tp_placement=spmd.S(1) if cut == spmd.S(dim) else spmd.R)


def is_grouped(x: torch.Tensor) -> bool:
    """Return whether the experts compute ``x`` in grouped products, whose offsets stay on the
    device: in bfloat16 on CUDA.
    """
    return x.is_cuda and x.dtype == torch.bfloat16


def groups_of(x: torch.Tensor, counts: torch.Tensor) -> Groups:
    """Return the groups of the rows of ``x``; ``counts``, int64 [experts], has their sizes."""
    if is_grouped(x):
        return counts.cumsum(0, dtype=torch.int32)
    sizes: list[int] = counts.tolist()
    return sizes


def grouped_products(x: torch.Tensor, weights: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the products [R, out] of rows [R, in], sorted by expert, with the weights
    [experts, in, out] of their experts.
    """
    if isinstance(groups, torch.Tensor):
        return F.grouped_mm(x, weights, offs=groups)
    return torch.cat([rows @ w for rows, w in zip(x.split(groups), weights, strict=True)])


def low_rank(experts: Any, name: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return what the adapter of the weight ``name`` adds to the products with the weight:
    alpha / rank * x @ A @ B.T, [R, out], of rows [R, in].
    """
    a, b = (_local(getattr(factors, name)) for factors in (experts.lora_a, experts.lora_b))
    if isinstance(groups, torch.Tensor):
        a, b = (F.pad(factor, (0, -factor.shape[-1] % ALIGNMENT)) for factor in (a, b))
    inner = grouped_products(x, a, groups)
    scale: float = experts._lora_scaling
    return scale * grouped_products(inner, b.mT, groups)


def _local(factor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a factor. Ranks with parts of each expert add up the gradient of
    a factor that all of them have.
    """
    if not isinstance(factor, DTensor):
        return factor
    sums = [Partial() if placement.is_replicate() else placement for placement in factor.placements]
    return factor.to_local(grad_placements=sums)
