"""Experts of a mixture in the precision of their input; torchtitan's always compute in bfloat16."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts


class Experts(GroupedExperts):
    """torchtitan's grouped experts in bfloat16 on CUDA; elsewhere one plain product per expert.

    It is a subclass with the parameters of GroupedExperts, so that torchtitan shards and wraps it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [R, D] for tokens [R, D], which are sorted by expert.

        ``num_tokens_per_expert_E``, int64 [E], has the number of tokens of each expert of this
        rank.
        """
        if x_RD.is_cuda and x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        weights = (
            w.to_local() if isinstance(w, DTensor) else w
            for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        )
        # The backward pass of torch._grouped_mm on CPU refuses many shapes and strides.
        tokens = x_RD.split(num_tokens_per_expert_E.tolist())
        experts = zip(tokens, *(w.unbind() for w in weights), strict=True)
        return torch.cat([(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w3, w2 in experts])
