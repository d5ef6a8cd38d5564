"""Experts that compute in the precision of their input."""

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module


class Experts(GroupedExperts):
    """torchtitan's grouped experts in bfloat16 on CUDA; elsewhere one plain product per expert, in
    the precision of the input.

    It is a subclass with the parameters of GroupedExperts, so that torchtitan shards and wraps it.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [R, D] for tokens [R, D], which are sorted by expert.

        ``num_tokens_per_expert_E``, int64 [E], has the number of tokens of each expert of this
        rank.
        """
        if x_RD.is_cuda and x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        weights = _local(self.w1_EFD, self.w3_EFD, self.w2_EDF)
        # The backward pass of torch._grouped_mm on CPU refuses many shapes and strides.
        tokens = x_RD.split(num_tokens_per_expert_E.tolist())
        experts = zip(tokens, *(w.unbind() for w in weights), strict=True)
        return torch.cat([(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w3, w2 in experts])


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

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs as ``Experts`` does."""
        weight, bias, down = _local(self.gate_up_EDG, self.gate_up_bias, self.down_EFD)
        hidden = self._project(x_RD, num_tokens_per_expert_E, weight, bias)
        gate = hidden[..., ::2].clamp(max=self.bound)
        up = hidden[..., 1::2].clamp(-self.bound, self.bound)
        values = (up + 1) * gate * torch.sigmoid(gate * self.slope)
        return self._project(values, num_tokens_per_expert_E, down, self._bias_of_sum())

    def _project(
        self, x: torch.Tensor, counts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        if x.is_cuda and x.dtype == torch.bfloat16:
            products = self._grouped_mm(A=x, B_t=weight, offs=counts.cumsum(0, dtype=torch.int32))
            return products + bias.repeat_interleave(counts, 0, output_size=len(x))
        experts = zip(x.split(counts.tolist()), weight, bias, strict=True)
        return torch.cat([rows @ w + b for rows, w, b in experts])

    def _bias_of_sum(self) -> torch.Tensor:
        """Return this rank's part of ``down_bias``: if ranks hold parts of each expert, whose
        products are added, the first rank has it.
        """
        bias, down = self.down_bias, self.down_EFD
        if not (isinstance(down, DTensor) and down.placements == (Shard(1),)):
            return next(_local(bias))
        own = bias.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]
        return own * float(down.device_mesh.get_local_rank() == 0)  # type: ignore[no-any-return]


def _local(*parameters: torch.Tensor) -> Iterator[torch.Tensor]:
    return (each.to_local() if isinstance(each, DTensor) else each for each in parameters)
