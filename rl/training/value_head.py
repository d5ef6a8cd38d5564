"""Output layer of a critic: expected returns, from hidden states."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear


class ValueHead(Linear):
    """Projects each hidden state to one number; every tensor-parallel rank has all values."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the values, float32 [B, L], of ``hidden`` [B, L, D]."""
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        if isinstance(hidden, DTensor):
            hidden = hidden.to_local()
        return F.linear(hidden, weight).float().sum(-1)  # drops dimension 1; FSDP forbids a view
