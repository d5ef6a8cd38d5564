"""Experts that compute in the precision of their input."""

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.module import Module

from rl.model.expert_adapters import add_adapters, grouped_products, groups_of, low_rank


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

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [R, D] for tokens [R, D], which are sorted by expert.

        ``num_tokens_per_expert_E``, int64 [E], has the number of tokens of each expert of this
        rank.
        """
        if hasattr(self, "lora_a"):
            return self._adapted(x_RD, num_tokens_per_expert_E)
        if x_RD.is_cuda and x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        weights = _local(self.w1_EFD, self.w3_EFD, self.w2_EDF)
        # The backward pass of torch._grouped_mm on CPU refuses many shapes and strides.
        tokens = x_RD.split(num_tokens_per_expert_E.tolist())
        experts = zip(tokens, *(w.unbind() for w in weights), strict=True)
        return torch.cat([(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w3, w2 in experts])

    def _adapted(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        groups = groups_of(x, counts)

        def project(name: str, rows: torch.Tensor) -> torch.Tensor:
            weights = next(_local(getattr(self, name)))
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

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs as ``Experts`` does."""
        bias = next(_local(self.gate_up_bias))
        hidden = self._project(x_RD, num_tokens_per_expert_E, "gate_up_EDG", bias)
        gate = hidden[..., ::2].clamp(max=self.bound)
        up = hidden[..., 1::2].clamp(-self.bound, self.bound)
        values = (up + 1) * gate * torch.sigmoid(gate * self.slope)
        return self._project(values, num_tokens_per_expert_E, "down_EFD", self._bias_of_sum())

    def _project(
        self, x: torch.Tensor, counts: torch.Tensor, name: str, bias: torch.Tensor
    ) -> torch.Tensor:
        weight = next(_local(getattr(self, name)))
        if x.is_cuda and x.dtype == torch.bfloat16:
            products = self._grouped_mm(A=x, B_t=weight, offs=counts.cumsum(0, dtype=torch.int32))
            outputs = products + bias.repeat_interleave(counts, 0, output_size=len(x))
        else:
            experts = zip(x.split(counts.tolist()), weight, bias, strict=True)
            outputs = torch.cat([rows @ w + b for rows, w, b in experts])
        if not hasattr(self, "lora_a"):
            return outputs
        return outputs + low_rank(self, name, x, groups_of(x, counts))

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
