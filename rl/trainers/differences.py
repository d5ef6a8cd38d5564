"""Differences between two models' activations, and their likely causes."""

import math
from dataclasses import dataclass

import torch

from rl.model.activations import Activations
from rl.model.shape import ModelShape

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Relative difference of a module's output that rounding of this type may cause."""

GROWTH = 8.0
"""Factor by which rounding may grow from one module to the next."""

FITS = 5e-4
"""Largest relative difference between an output and its explanation."""

UNEXPLAINED = "no simple cause explains it"

KINDS = {
    "tok_embeddings": "embedding",
    "attention_norm": "norm",
    "q_norm": "norm",
    "k_norm": "norm",
    "ffn_norm": "norm",
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


def module_differences(ours: Activations, theirs: Activations) -> list[ModuleDifference]:
    """Return the difference of each output, in the order of execution."""
    found = list[ModuleDifference]()
    largest = 0.0
    for name, output in ours.outputs.items():
        other = theirs.outputs.get(name)
        if other is None or other.shape != output.shape:
            error = math.inf
        else:
            error = _relative(other, output)
        dtypes = [each.dtypes[name] for each in (ours, theirs) if name in each.dtypes]
        floor = max(TOLERANCES.get(dtype, 0.3) for dtype in dtypes)
        found.append(ModuleDifference(name=name, error=error, limit=max(floor, GROWTH * largest)))
        largest = max(largest, error)
    return found


def first_beyond_rounding(differences: list[ModuleDifference]) -> ModuleDifference | None:
    """Return the first output that differs beyond rounding."""
    return next((each for each in differences if not each.error <= each.limit), None)


def kind_of(name: str) -> str:
    """Return the kind of a difference in this output."""
    parts = [part for part in name.split(".") if part in KINDS]
    return KINDS[parts[-1]] if parts else "projection"


def _relative(other: torch.Tensor, output: torch.Tensor) -> float:
    """Return the relative difference of the worst row that both models computed."""
    both = ~(other.isnan().any(1) | output.isnan().any(1))
    if not both.any():
        return 0.0
    difference = (other[both] - output[both]).norm(dim=1)
    scale = output[both].norm(dim=1).clamp(min=1e-30)
    return float((difference / scale).max())


def rotation_cause(side: Activations, layer: str, shape: ModelShape) -> str:
    """Return why the rotary embedding of ``layer`` is wrong; empty if it is right."""
    size = (len(side.positions), -1, shape.head_dim)
    before = side.outputs[f"{layer}.attention.q_norm"].double().reshape(size)
    after = side.outputs[f"{layer}.attention.rope.queries"].double()
    positions = torch.tensor(side.positions, dtype=torch.float64)
    base = shape.rope_theta

    def fits(base: float, *, shift: int = 0, dtype: torch.dtype = torch.float64) -> bool:
        wanted = _rotated(before, positions + shift, base, dtype)
        return _relative(after, wanted.flatten(1)) < FITS

    if fits(base):
        return ""
    if fits(base, dtype=torch.bfloat16):
        return "its cosines and sines are rounded to bfloat16"
    for shift in (1, -1):
        if fits(base, shift=shift):
            return f"its positions are shifted by {shift}"
    found = _base(before, after.reshape(size), positions)
    if fits(found):
        return f"its base is {found:.6g}, and that of the model is {base:g}"
    return UNEXPLAINED


def _rotated(
    heads: torch.Tensor, positions: torch.Tensor, base: float, dtype: torch.dtype
) -> torch.Tensor:
    """Rotate ``heads`` [P, N, head_dim] with cosines and sines of ``dtype``."""
    half = heads.shape[-1] // 2
    angles = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    cos = angles.cos().to(dtype).double()[:, None]
    sin = angles.sin().to(dtype).double()[:, None]
    first, second = heads.split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _base(before: torch.Tensor, after: torch.Tensor, positions: torch.Tensor) -> float:
    """Return the base by which the second pair of the first head at position 1 was turned."""
    half = before.shape[-1] // 2
    row = int((positions - 1.0).abs().argmin())
    pairs = [torch.complex(each[row, 0, 1], each[row, 0, 1 + half]) for each in (before, after)]
    angle = float((pairs[1] / pairs[0]).angle())
    return max(angle, 1e-30) ** -half if half > 1 else math.nan


def attention_cause(side: Activations, layer: str, rows: list[int], shape: ModelShape) -> str:
    """Return why the attention of ``layer`` is wrong at ``rows``; empty if it is right.

    ``side`` has all positions of the sequence, from 0 on; a generator has not computed the last.
    """
    found = side.outputs[f"{layer}.attention.inner_attention"]
    computed = ~found.isnan().any(1)
    length = int(computed.sum())
    names = ("rope.queries", "rope.keys", "qkv_linear.values")
    outputs = (side.outputs[f"{layer}.attention.{name}"][computed].double() for name in names)
    queries, keys, values = (each.reshape(length, -1, shape.head_dim) for each in outputs)
    queries = queries[rows]
    found = found[rows].double()
    before = torch.arange(length) <= torch.tensor(rows)[:, None]

    def fits(keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> bool:
        wanted = _attended(queries, keys, values, mask)
        return _relative(found, wanted.flatten(1)) < FITS

    if fits(keys, values, before):
        return ""
    if fits(keys, values, torch.ones_like(before)):
        return "its mask is missing: tokens attend to later tokens"
    if fits(keys, values, before & ~torch.eye(length, dtype=torch.bool)[rows]):
        return "its mask is wrong: tokens do not attend to themselves"
    if fits(keys.flip(1), values.flip(1), before):
        return "the heads of keys and values are in another order"
    if fits(keys.flip(1), values, before) or fits(keys, values.flip(1), before):
        return "the heads of keys and those of values are in different orders"
    return UNEXPLAINED


def _attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return attention [R, N, head_dim] of queries [R, N, head_dim] to keys and values
    [L, N_kv, head_dim] under ``mask`` [R, L].
    """
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
    scores = torch.einsum("rnh,lnh->nrl", queries, keys) / math.sqrt(queries.shape[-1])
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("nrl,lnh->rnh", weights.nan_to_num(), values)


def temperature_of(
    logits: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor
) -> tuple[float, float]:
    """Return the temperature under which ``tokens`` [R] have log-probs closest to ``logprobs``
    [R], and the largest difference left. ``logits`` are [R, V].
    """

    def difference(temperature: float) -> float:
        found = (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return float((found - logprobs).abs().max())

    best = 1.0
    for width in (3.0, 0.3, 0.03, 0.003, 0.0003):  # each round narrows the range around the best
        around = torch.linspace(-width, width, 81).exp().mul(best).tolist()
        best = min(around, key=difference)
    return best, difference(best)
