"""Output layer of a critic: expected returns, from hidden states."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.models.common import Linear

from rl.model.shards import local_of


class ValueHead(Linear):
    """Projects each hidden state to one number; every tensor-parallel rank has all values."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the values, float32 [B, L], of ``hidden`` [B, L, D]."""
        values = F.linear(local_of(hidden), local_of(self.weight))
        return values.float().sum(-1)  # drops dimension 1; FSDP forbids a view
