"""Experts that compute in the precision of their input."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import LocalDispatchMetadata, LocalTokenDispatcher
from torchtitan.protocols.module import Module

from rl.model.expert_adapters import add_adapters, grouped_products, groups_of, is_grouped, low_rank
from rl.model.shape import ModelShape
from rl.model.shards import local_of


class OwnExperts(LocalTokenDispatcher):
    """Dispatcher of tokens to this rank's experts, if ``ranks`` divide whole experts."""

    def __init__(self, shape: ModelShape, *, ranks: int, rank: int):
        experts = shape.num_experts
        super().__init__(self.Config(num_experts=experts, top_k=shape.experts_per_token))
        self.held = experts // ranks
        self.own = slice(rank * self.held, (rank + 1) * self.held)

    def dispatch(self, x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, *counts: Any) -> tuple:
        """Dispatch as torchtitan does, but only to this rank's experts.

        For grouped products all tokens stay in the result, so that no shape depends on the choice
        of experts. The tokens of other ranks' experts come last, with weights of 0. Otherwise they
        are left out, which synchronizes with the device.
        """
        if is_grouped(x_TD):
            ids_TK = (ids_TK - self.own.start) % self.num_experts
            scores_TK = scores_TK.masked_fill(ids_TK >= self.held, 0)
        sorted_ND, counts_E, metadata = super().dispatch(x_TD, scores_TK, ids_TK, *counts)
        own_E = counts_E[self.own]
        if is_grouped(x_TD):
            return sorted_ND, own_E, metadata
        first = int(counts_E[: self.own.start].sum())
        mine = slice(first, first + int(own_E.sum()))
        own_metadata = LocalDispatchMetadata(
            token_indices_experts_sorted_N=metadata.token_indices_experts_sorted_N[mine],
            topk_scores_experts_sorted_N=metadata.topk_scores_experts_sorted_N[mine],
        )
        return sorted_ND[mine], own_E, own_metadata

    def combine(
        self, routed_output_RD: Tensor, metadata: LocalDispatchMetadata, x_TD: Tensor
    ) -> Tensor:
        """Combine as torchtitan does; outputs with weights of 0 may be any number."""
        if is_grouped(x_TD):
            unused_R = metadata.topk_scores_experts_sorted_N == 0
            routed_output_RD = routed_output_RD.masked_fill(unused_R.unsqueeze(1), 0)
        return super().combine(routed_output_RD, metadata, x_TD)


class Experts(GroupedExperts):
    """torchtitan's grouped experts in bfloat16 on CUDA; elsewhere one plain product per expert, in
    the precision of the input.

    It is a subclass with the parameters of GroupedExperts, so that torchtitan shards and wraps it.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        lora: tuple[int, float] | None = None
        """Rank and alpha of adapters of the weights; None for no adapters."""

    in_dim = 2
    """Dimension of a weight that its input has."""

    def __init__(self, config: Config):
        super().__init__(config)
        if config.lora is not None:
            add_adapters(self, config)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Return the experts' outputs [R, D] for tokens [R, D], which are sorted by expert.

        ``num_tokens_per_expert_E``, int64 [E], has the number of tokens of each expert of this
        rank. Outputs of further tokens, which only grouped products can have, are undefined.
        """
        if hasattr(self, "lora_a"):
            return self._adapted(x_RD, num_tokens_per_expert_E)
        if is_grouped(x_RD):
            return super().forward(x_RD, num_tokens_per_expert_E)
        # The backward pass of torch._grouped_mm on CPU refuses many shapes and strides.
        tokens = x_RD.split(num_tokens_per_expert_E.tolist())
        weights = (local_of(weight).unbind() for weight in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        experts = zip(tokens, *weights, strict=True)
        return torch.cat([(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w3, w2 in experts])

    def _adapted(self, x: Tensor, counts: Tensor) -> Tensor:
        groups = groups_of(x, counts)

        def project(name: str, rows: Tensor) -> Tensor:
            weights = local_of(getattr(self, name))
            products = grouped_products(rows, weights.mT, groups)
            return products + low_rank(self, name, rows, groups)

        hidden = F.silu(project("w1_EFD", x)) * project("w3_EFD", x)
        return project("w2_EDF", hidden)


class ClampedExperts(GroupedExperts):
    """Experts with biases, whose gates and values are bounded (arXiv:2508.10925).

    Gates are the even columns of ``gate_up_EDG``, [experts, D, 2 * hidden_dim], and values the odd
    ones. The weights are those of Hugging Face, [experts, in, out].
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        slope: float
        """Factor of the gate within its sigmoid."""
        bound: float
        """Largest gate, and largest absolute value."""
        lora: tuple[int, float] | None = None
        """Rank and alpha of adapters of the weights; None for no adapters."""

    in_dim = 1
    """Dimension of a weight that its input has."""

    def __init__(self, config: Config):
        Module.__init__(self)
        self.num_experts = config.num_experts
        self.slope = config.slope
        self.bound = config.bound
        experts, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        self.gate_up_EDG = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * hidden))
        self.down_EFD = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down_bias = nn.Parameter(torch.empty(experts, dim))
        if config.lora is not None:
            add_adapters(self, config)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Return the experts' outputs as ``Experts`` does."""
        bias = local_of(self.gate_up_bias)
        hidden = self._project(x_RD, num_tokens_per_expert_E, "gate_up_EDG", bias)
        gate = hidden[..., ::2].clamp(max=self.bound)
        up = hidden[..., 1::2].clamp(-self.bound, self.bound)
        values = (up + 1) * gate * torch.sigmoid(gate * self.slope)
        return self._project(values, num_tokens_per_expert_E, "down_EFD", self._bias_of_sum())

    def _project(self, x: Tensor, counts: Tensor, name: str, bias: Tensor) -> Tensor:
        weight = local_of(getattr(self, name))
        if is_grouped(x):
            ends = counts.cumsum(0, dtype=torch.int32)
            rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
            experts = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
            products = self._grouped_mm(A=x, B_t=weight, offs=ends)
            outputs = products + bias.index_select(0, experts)
        else:
            parts = zip(x.split(counts.tolist()), weight, bias, strict=True)
            outputs = torch.cat([rows @ w + b for rows, w, b in parts])
        if not hasattr(self, "lora_a"):
            return outputs
        return outputs + low_rank(self, name, x, groups_of(x, counts))

    def _bias_of_sum(self) -> Tensor:
        """Return this rank's part of ``down_bias``: if ranks hold parts of each expert, whose
        products are added, the first rank has it.
        """
        bias, down = self.down_bias, self.down_EFD
        if not (isinstance(down, DTensor) and down.placements == (Shard(1),)):
            return local_of(bias)
        local = bias.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]
        return local * float(down.device_mesh.get_local_rank() == 0)  # type: ignore[no-any-return]
