"""Differences between two models' activations."""

import math
from dataclasses import dataclass

import torch

from rl.model.activations import Activations

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Relative difference of a module's output that rounding of this type may cause."""

GROWTH = 8.0
"""Factor by which rounding may grow from one module to the next."""

EXPERTS = ".moe.router.experts"
"""End of the name of the experts that a layer chose."""

KINDS = {
    "tok_embeddings": "embedding",
    "attention_norm": "norm",
    "attention_post_norm": "norm",
    "q_norm": "norm",
    "k_norm": "norm",
    "ffn_norm": "norm",
    "ffn_post_norm": "norm",
    "norm": "norm",
    "rope": "position encoding",
    "inner_attention": "attention",
    "router": "routing",
    "moe": "routing",
}
"""Kind of a difference by module; ``projection`` for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A difference beyond rounding between two models."""

    kind: str
    """``weights``, ``embedding``, ``norm``, ``projection``, ``position encoding``, ``attention``,
    ``routing``, ``output head``, ``prefix cache`` or ``sampling settings``."""
    module: str
    """Module or parameter that differs first; empty for sampling settings."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDifference:
    """Difference of one output between two models."""

    name: str
    error: float
    """Norm of the difference over the norm of the output, at the worst position; infinite if a
    model lacks the module."""
    limit: float
    """Largest error that rounding explains."""


def differing_experts(ours: Activations, theirs: Activations) -> dict[str, str]:
    """Return the number of tokens that go to other experts, as a text, by layer; layers without
    such a token are left out.
    """
    texts = {}
    for name in (key for key in ours.outputs if key.endswith(EXPERTS)):
        own, other = (each.outputs[name].sort(1).values for each in (ours, theirs))
        both = ~(own.isnan() | other.isnan()).any(1)
        differs = (own != other).any(1) & both
        if differs.any():
            text = f"{int(differs.sum())} of {int(both.sum())} tokens go to other experts"
            texts[layer_of(name)] = text
    return texts


def layer_of(name: str) -> str:
    """Return the layer that the output is of, such as "layers.3", or ``name`` outside layers."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name


def module_differences(ours: Activations, theirs: Activations) -> list[ModuleDifference]:
    """Return the difference of each output, in the order of execution."""
    result = list[ModuleDifference]()
    largest = 0.0
    for name, output in ours.outputs.items():
        if name.endswith(EXPERTS):
            continue
        other = theirs.outputs.get(name)
        error = 0.0
        if other is None or other.shape != output.shape:
            error = math.inf
        elif (both := ~(other.isnan().any(1) | output.isnan().any(1))).any():
            difference = (other[both] - output[both]).norm(dim=1)
            scale = output[both].norm(dim=1).clamp(min=1e-30)
            error = float((difference / scale).max())  # of the worst row that both computed
        dtypes = [side.dtypes[name] for side in (ours, theirs) if name in side.dtypes]
        floor = max(TOLERANCES.get(dtype, 0.3) for dtype in dtypes)
        result.append(ModuleDifference(name=name, error=error, limit=max(floor, GROWTH * largest)))
        largest = max(largest, error)
    return result


def first_beyond_rounding(differences: list[ModuleDifference]) -> ModuleDifference | None:
    """Return the first output that differs beyond rounding."""
    return next((module for module in differences if not module.error <= module.limit), None)


def kind_of(name: str) -> str:
    """Return the kind of a difference in this output."""
    parts = [part for part in name.split(".") if part in KINDS]
    return KINDS[parts[-1]] if parts else "projection"


def temperature_of(
    logits: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor
) -> tuple[float, float]:
    """Return the temperature under which ``tokens`` [R] have log-probs closest to ``logprobs``
    [R], and the largest difference left. ``logits`` are [R, V].
    """

    def difference(temperature: float) -> float:
        scaled = (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return float((scaled - logprobs).abs().max())

    best = 1.0
    for width in (3.0, 0.3, 0.03, 0.003, 0.0003):  # each round narrows the range around the best
        around = torch.linspace(-width, width, 81).exp().mul(best).tolist()
        best = min(around, key=difference)
    return best, difference(best)
