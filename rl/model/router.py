"""Router of a layer's experts, shared by trainer and generator."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common.moe import TokenChoiceTopKRouter


class Router(TokenChoiceTopKRouter):
    """torchtitan's router, which can be told the experts of each token.

    Weights of given experts are computed from the router's own scores, so that the gradient flows
    through the router (arXiv:2510.11370).
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        has_bias: bool = False
        """Whether a bias is added to the scores where experts are chosen."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.expert_bias: nn.Parameter | None = None
        """Bias of each expert in the choice, but not in its weight, [E]. No gradient changes it."""
        if config.has_bias:
            zeros = torch.zeros(config.num_experts)
            self.expert_bias = nn.Parameter(zeros, requires_grad=False)
        self.given: torch.Tensor | None = None
        """Experts of the cells of the next forward pass, int64 [B, L, K]. -1 means that the router
        chooses. None means that the router chooses for all cells."""
        self.on_choice: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        """Function of the experts that the router itself prefers, int64 [B, L, K], and of its
        scores, float32 [B, L, E], called in each forward pass."""
        self.keeps = False
        """Whether forward passes keep their choice. A recomputation must not."""
        self.kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """Experts that the router prefers and those that compute, int64 [B, L, K], and the scores,
        float32 [B, L, E], of the last forward pass that kept them."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weights and ids of the experts of each token, [B, L, K], and all scores
        [B, L, E].
        """
        bias = expert_bias_E if self.expert_bias is None else self.expert_bias
        weights, preferred, scores = super().forward(x_BLD, bias)
        if self.on_choice is not None:
            self.on_choice(preferred, scores)
        chosen = preferred
        if self.given is not None:
            experts = self.given
            if isinstance(chosen, DTensor):  # each rank has all of ``experts``
                mesh = chosen.device_mesh
                whole = [Replicate()] * mesh.ndim
                experts = DTensor.from_local(experts, mesh, whole, run_check=False)
                experts = experts.redistribute(placements=chosen.placements)
            chosen = torch.where(experts < 0, chosen, experts)
            weights = scores.gather(-1, chosen)
            if self.route_norm:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = weights * self.route_scale
        if self.keeps:
            self.kept = (preferred, chosen, scores)
        return weights, chosen, scores


def routers_of(model: nn.Module) -> list[Router]:
    """Return the routers of the layers of ``model``, in order; none if the model is dense."""
    return [module for module in model.modules() if isinstance(module, Router)]


def give(routers: Sequence[Router], experts: torch.Tensor | None = None) -> None:
    """Tell ``routers``, one for each layer, the ``experts`` of the next forward pass, integers
    [B, L, layers, K]; -1 or None lets them choose.
    """
    for layer, router in enumerate(routers):
        # a copy: views of one tensor have offsets, for each of which torch.compile compiles again
        router.given = None if experts is None else experts[:, :, layer].long()
