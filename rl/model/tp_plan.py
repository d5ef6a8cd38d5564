"""Tensor-parallel plan of the generator as data: parameter name -> cut.

The generator's model builder, the weight router and the planner read it.

Only parameters are pushed. Each side computes its own buffers: a RoPE cache is float32 and is never
cast.
"""

import math
import re
from enum import Enum, auto

from rl.errors import require
from rl.model.decoder import parameter_shapes
from rl.model.shape import ModelShape
from rl.model.shards import Box, Layout, Region


class Cut(Enum):
    """Dimension of a parameter that is divided among the ranks."""

    COLUMN = auto()
    """Output features."""
    ROW = auto()
    """Input features; an all-reduce adds the ranks' products."""
    KV_GROUPS = auto()
    """KV heads with their query heads. Ranks that share a KV head divide its query heads."""
    VOCAB = auto()
    """Rows of the vocabulary. The last rank has fewer rows if they do not divide evenly."""
    EXPERTS_DIM_1 = auto()
    """Dimension 1, the hidden features of every expert; with expert parallelism, whole experts. The
    all-reduce follows the mixing of the experts."""
    EXPERTS_DIM_2 = auto()
    """Dimension 2 likewise."""
    EXPERTS_FIRST_RANK = auto()
    """As FIRST_RANK; with expert parallelism, whole experts."""
    FIRST_RANK = auto()
    """No dimension: the first rank holds the whole parameter, and the all-reduce adds it once."""
    REPLICATED = auto()
    """No dimension: every rank holds the whole parameter."""


EXPERTS = r"layers\.\d+\.moe\.routed_experts\.inner_experts\."
# torchtitan has separate parameters, w1 and w3, for gate and up projections.
TP_PLAN: tuple[tuple[str, Cut], ...] = (
    (r"tok_embeddings\.weight", Cut.VOCAB),
    (r"lm_head\.weight", Cut.VOCAB),
    (r"layers\.\d+\.attention\.qkv_linear\.(wqkv|wk|wv)\.(weight|bias)", Cut.KV_GROUPS),
    (r"layers\.\d+\.attention\.qkv_linear\.wq\.(weight|bias)", Cut.COLUMN),
    (r"layers\.\d+\.attention\.sinks", Cut.COLUMN),
    (r"layers\.\d+\.attention\.wo\.weight", Cut.ROW),
    (r"layers\.\d+\.attention\.wo\.bias", Cut.FIRST_RANK),
    (r"layers\.\d+\.feed_forward\.(w1|w3)\.(weight|bias)", Cut.COLUMN),
    (r"layers\.\d+\.feed_forward\.w2\.weight", Cut.ROW),
    (r"layers\.\d+\.feed_forward\.w2\.bias", Cut.FIRST_RANK),
    (r"layers\.\d+\.delta_net\.((qkv|z|a|b|conv)\.weight|A_log|dt_bias)", Cut.COLUMN),
    (r"layers\.\d+\.delta_net\.wo\.weight", Cut.ROW),
    (r"layers\.\d+\.delta_net\.norm\.weight", Cut.REPLICATED),
    (r"layers\.\d+\.moe\.shared_experts\.(w1|w3)\.weight", Cut.COLUMN),
    (r"layers\.\d+\.moe\.shared_experts\.w2\.weight", Cut.ROW),
    (r"layers\.\d+\.moe\.shared_experts\.gate\.weight", Cut.REPLICATED),
    (rf"{EXPERTS}(w1_EFD|w3_EFD|gate_up_bias|down_EFD)", Cut.EXPERTS_DIM_1),
    (rf"{EXPERTS}(w2_EDF|gate_up_EDG)", Cut.EXPERTS_DIM_2),
    (rf"{EXPERTS}down_bias", Cut.EXPERTS_FIRST_RANK),
    (r"layers\.\d+\.moe\.router\.(gate\.(weight|bias)|expert_bias)", Cut.REPLICATED),
    (r"layers\.\d+\.((attention|ffn)_(post_)?norm|attention\.[qk]_norm)\.weight", Cut.REPLICATED),
    (r"norm\.weight", Cut.REPLICATED),
)


def cut_of(name: str) -> Cut:
    """Return the cut of parameter ``name``. Raises KeyError if the plan does not list it."""
    for pattern, cut in TP_PLAN:
        if re.fullmatch(pattern, name):
            return cut
    raise KeyError(f"the generator's tensor-parallel plan has no line for parameter {name!r}")


def generator_layout(
    shape: ModelShape, *, fuse_qkv: bool, tp: int, expert_parallel: bool = False
) -> tuple[Layout, ...]:
    """Return the layouts of a generator's ``tp`` ranks, from rank 0 on, for a policy of ``shape``.

    With ``expert_parallel``, whole experts are divided among the ranks, else the features of each
    expert. Regions of two ranks are equal or disjoint. Raises ValueError, naming the parameter, if
    ``tp`` does not fit the model: see ``check_generator``.
    """
    shapes = parameter_shapes(shape, fuse_qkv=fuse_qkv)

    def boxes(name: str, rank: int) -> list[Box]:
        if expert_parallel and cut_of(name).name.startswith("EXPERTS"):
            return [_even(name, shapes[name], 0, tp, rank)]
        return _boxes(name, shapes[name], shape, tp, rank)

    return tuple(
        tuple(Region(n, shapes[n], box) for n in shapes for box in boxes(n, rank))
        for rank in range(tp)
    )


def _boxes(name: str, whole: tuple[int, ...], shape: ModelShape, tp: int, rank: int) -> list[Box]:
    match cut_of(name):
        case Cut.REPLICATED:
            return [Box.whole(whole)]
        case Cut.FIRST_RANK | Cut.EXPERTS_FIRST_RANK:
            return [Box.whole(whole).slab(0, 0, 0 if rank else whole[0])]
        case Cut.VOCAB:
            size = -(-whole[0] // tp)  # as torchtitan's embedding counts
            start = min(rank * size, whole[0])
            return [Box.whole(whole).slab(0, start, min(size, whole[0] - start))]
        case Cut.KV_GROUPS if tp > shape.n_kv_heads:
            sharers = tp // shape.n_kv_heads
            group = _even(name, whole, 0, shape.n_kv_heads, rank // sharers)
            rows = group.shape[0]
            # The rows of a fused group are its queries, then its key and value.
            keys = min(rows, 2 * shape.head_dim)
            queries = (rows - keys) // sharers
            shared = group.slab(0, rows - keys, keys)
            part = group.slab(0, rank % sharers * queries, queries)
            return [part, shared] if queries else [shared]
        case Cut.KV_GROUPS | Cut.COLUMN:
            dim = 0
        case Cut.ROW | Cut.EXPERTS_DIM_1:
            dim = 1
        case Cut.EXPERTS_DIM_2:
            dim = 2
    return [_even(name, whole, dim, tp, rank)]


def _even(name: str, whole: tuple[int, ...], dim: int, parts: int, index: int) -> Box:
    if whole[dim] % parts:
        raise ValueError(
            f"{name}: dimension {dim} of {whole} cannot be cut into {parts} equal parts"
        )
    size = whole[dim] // parts
    return Box.whole(whole).slab(dim, index * size, size)


def check_generator(tp: int, shape: ModelShape, *, expert_parallel: bool) -> None:
    """Raise ConfigError unless a generator of ``tp`` ranks can hold a policy of ``shape``. Any
    vocabulary size fits.
    """
    require(
        bool(shape.num_experts) or not expert_parallel,
        "generator.expert_parallel is True; it must be False if model.num_experts is 0",
    )
    _check_norms("generator.tensor_parallel_degree", tp, shape)
    width = "num_experts" if expert_parallel else _width(shape)
    sizes = {name: getattr(shape, name) for name in ("n_heads", width, *_more_sizes(shape))}
    kv_heads = shape.n_kv_heads
    allowed = [d for d in divisors(*sizes.values()) if kv_heads % d == 0 or d % kv_heads == 0]
    listed = " and ".join(f"{name}={size}" for name, size in sizes.items())
    require(
        tp in allowed,
        f"generator.tensor_parallel_degree is {tp}; it must divide the model's {listed}, and "
        f"divide n_kv_heads={kv_heads} or be a multiple of it: allowed are {allowed}",
    )


def _check_norms(field: str, degree: int, shape: ModelShape) -> None:
    require(
        degree == 1 or not shape.wide_qk_norm,
        f"{field} is {degree}; it must be 1 for the family {shape.family!r}, whose norms of "
        "queries and keys span all heads and are not sharded",
    )


def _width(shape: ModelShape) -> str:
    """Return the name of the field with the width of the feed-forward layers."""
    return "moe_hidden_dim" if shape.num_experts else "hidden_dim"


def _more_sizes(shape: ModelShape) -> list[str]:
    """Return the names of other fields that tensor parallelism divides."""
    names = ["delta_key_heads"] if shape.layers_with_delta_rule else []
    return [*names, *(["shared_expert_dim"] if shape.shared_expert_dim else [])]


def divisors(*sizes: int) -> list[int]:
    """Return the common divisors of ``sizes``, in order. The time is proportional to the square
    root of the smallest size.
    """
    common = math.gcd(*sizes)
    small = [d for d in range(1, math.isqrt(common) + 1) if common % d == 0]
    return sorted({*small, *(common // d for d in small)})


def check_divides(field: str, degree: int, shape: ModelShape) -> None:
    """Raise ConfigError unless ``degree`` divides every size that the trainer's tensor parallelism
    divides.
    """
    _check_norms(field, degree, shape)
    names = ("n_heads", "n_kv_heads", "vocab_size", _width(shape), *_more_sizes(shape))
    sizes = {name: getattr(shape, name) for name in names}
    allowed = divisors(*sizes.values())
    listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
    require(
        degree in allowed,
        f"{field} is {degree}; it must divide the model's {listed}: allowed are {allowed}",
    )
