"""The generator's tensor-parallel plan as data: parameter name -> how it is cut.

Three read it: the generator's model builder cuts by it, the weight router slices by it, the
planner counts bytes by it.
"""

import re
from enum import Enum

import torch

from rl.errors import ConfigError
from rl.model.parts import Box, Part, Region
from rl.model.shape import ModelShape


class Cut(Enum):
    """Which dimension of a parameter the ranks divide among them."""

    COLUMN = 0
    """Output features: each rank computes some of them. Fused qkv is cut by whole kv groups."""
    ROW = 1
    """Input features: each rank sums over some of them, an all-reduce adds up."""
    VOCAB = 2
    """Rows of the vocabulary, in the embedding and the output head."""
    EXPERTS_COLUMN = 3
    """Output features of every expert: each rank computes some of each."""
    EXPERTS_ROW = 4
    """Input features of every expert; the all-reduce comes after the experts are mixed."""
    REPLICATED = -1

    @property
    def dim(self) -> int | None:
        cut = {Cut.COLUMN: 0, Cut.VOCAB: 0, Cut.ROW: 1, Cut.EXPERTS_COLUMN: 1, Cut.EXPERTS_ROW: 2}
        return cut.get(self)


TP_PLAN: tuple[tuple[str, Cut], ...] = (
    (r"tok_embeddings\.weight", Cut.VOCAB),
    (r"lm_head\.weight", Cut.VOCAB),
    (r"layers\.\d+\.attention\.qkv_linear\.(wqkv|wq|wk|wv)\.weight", Cut.COLUMN),
    (r"layers\.\d+\.attention\.wo\.weight", Cut.ROW),
    (r"layers\.\d+\.feed_forward\.(w1|w3)\.weight", Cut.COLUMN),
    (r"layers\.\d+\.feed_forward\.w2\.weight", Cut.ROW),
    (r"layers\.\d+\.moe\.routed_experts\.inner_experts\.(w1_EFD|w3_EFD)", Cut.EXPERTS_COLUMN),
    (r"layers\.\d+\.moe\.routed_experts\.inner_experts\.w2_EDF", Cut.EXPERTS_ROW),
    (r"layers\.\d+\.moe\.router\.gate\.weight", Cut.REPLICATED),
    (r"(layers\.\d+\.(attention_norm|ffn_norm|attention\.q_norm|attention\.k_norm)|norm)\.weight", Cut.REPLICATED),
)


def cut_of(name: str) -> Cut:
    """How parameter ``name`` is cut. Raises KeyError for one the table does not list."""
    for pattern, cut in TP_PLAN:
        if re.fullmatch(pattern, name):
            return cut
    raise KeyError(f"the generator's tensor-parallel plan has no line for parameter {name!r}")


def local_box(name: str, shape: tuple[int, ...], *, tp: int, rank: int) -> Box:
    """The part of parameter ``name`` of global ``shape`` that rank ``rank`` of ``tp`` holds.

    Raises ValueError where ``tp`` does not divide the dimension that is cut.
    """
    dim = cut_of(name).dim
    if dim is None or tp == 1:
        return Box.whole(shape)
    if shape[dim] % tp:
        raise ValueError(f"{name}: dimension {dim} of {tuple(shape)} cannot be cut into {tp} equal parts")
    size = shape[dim] // tp
    offset = tuple(rank * size if d == dim else 0 for d in range(len(shape)))
    return Box(offset, tuple(size if d == dim else n for d, n in enumerate(shape)))


def local_part(name: str, tensor: torch.Tensor, *, tp: int, rank: int) -> Part:
    """``tensor``, which rank ``rank`` of ``tp`` holds of parameter ``name``, with its place in the whole."""
    dim = cut_of(name).dim
    shape = tuple(n * tp if d == dim else n for d, n in enumerate(tensor.shape))
    return Part(Region(name, shape, local_box(name, shape, tp=tp, rank=rank)), tensor)


def check_divides(field: str, degree: int, shape: ModelShape) -> None:
    """Raise ConfigError unless ``degree`` divides all that tensor parallelism cuts."""
    sizes = {
        "n_heads": shape.n_heads,
        "n_kv_heads": shape.n_kv_heads,
        "vocab_size": shape.vocab_size,
        **({"moe_hidden_dim": shape.moe_hidden_dim} if shape.num_experts else {"hidden_dim": shape.hidden_dim}),
    }
    allowed = [d for d in range(1, shape.n_kv_heads + 1) if all(size % d == 0 for size in sizes.values())]
    if degree not in allowed:
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(f"{field} is {degree}; it must divide the model's {listed}: allowed are {allowed}")
