"""The generator's tensor-parallel plan as data: parameter name -> how it is cut.

Three read it: the generator's model builder cuts by it, the weight router slices by it, the
planner counts bytes by it.

Parameters alone are pushed. Buffers are each side's own: a RoPE cache is computed in float32 and
never cast.
"""

import math
import re
from enum import Enum

from rl.errors import ConfigError
from rl.model.qwen3 import parameter_shapes
from rl.model.shape import ModelShape
from rl.model.shards import Box, Layout, Region


class Cut(Enum):
    """Dimension of a parameter that the ranks divide among them."""

    COLUMN = "output features: each rank computes some of them"
    ROW = "input features: each rank sums over some of them, an all-reduce adds up"
    KV_GROUPS = (
        "kv heads with the query heads they serve; ranks that share a kv head divide its queries"
    )
    VOCAB = "rows of the vocabulary, the last rank has fewer where they do not come out even"
    EXPERTS_COLUMN = "output features of every expert, or whole experts"
    EXPERTS_ROW = (
        "input features of every expert, or whole experts; the all-reduce comes after the experts "
        "are mixed"
    )
    REPLICATED = "nothing"


# Gate and up projections are two parameters, w1 and w3, in torchtitan's model, so there is nothing
# to take apart.
TP_PLAN: tuple[tuple[str, Cut], ...] = (
    (r"tok_embeddings\.weight", Cut.VOCAB),
    (r"lm_head\.weight", Cut.VOCAB),
    (r"layers\.\d+\.attention\.qkv_linear\.(wqkv|wk|wv)\.weight", Cut.KV_GROUPS),
    (r"layers\.\d+\.attention\.qkv_linear\.wq\.weight", Cut.COLUMN),
    (r"layers\.\d+\.attention\.wo\.weight", Cut.ROW),
    (r"layers\.\d+\.feed_forward\.(w1|w3)\.weight", Cut.COLUMN),
    (r"layers\.\d+\.feed_forward\.w2\.weight", Cut.ROW),
    (r"layers\.\d+\.moe\.routed_experts\.inner_experts\.(w1_EFD|w3_EFD)", Cut.EXPERTS_COLUMN),
    (r"layers\.\d+\.moe\.routed_experts\.inner_experts\.w2_EDF", Cut.EXPERTS_ROW),
    (r"layers\.\d+\.moe\.router\.gate\.weight", Cut.REPLICATED),
    (
        r"(layers\.\d+\.(attention_norm|ffn_norm|attention\.q_norm|attention\.k_norm)|norm)\.weight",
        Cut.REPLICATED,
    ),
)


def cut_of(name: str) -> Cut:
    """How parameter ``name`` is cut. Raises KeyError for one the table does not list."""
    for pattern, cut in TP_PLAN:
        if re.fullmatch(pattern, name):
            return cut
    raise KeyError(f"the generator's tensor-parallel plan has no line for parameter {name!r}")


def generator_layout(
    shape: ModelShape, *, fuse_qkv: bool, tp: int, expert_parallel: bool = False
) -> tuple[Layout, ...]:
    """Return what each of a generator's ``tp`` ranks holds of a policy of ``shape``, from rank 0
    on.

    With ``expert_parallel`` the ranks divide whole experts among them, else the features of each.
    Regions of two ranks are equal or have nothing in common. Raises ValueError, naming the
    parameter, where ``tp`` does not fit the model: see ``check_generator``.
    """
    shapes = parameter_shapes(shape, fuse_qkv=fuse_qkv)

    def boxes(name: str, rank: int) -> list[Box]:
        if expert_parallel and cut_of(name) in (Cut.EXPERTS_COLUMN, Cut.EXPERTS_ROW):
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
        case Cut.VOCAB:
            size = -(-whole[0] // tp)  # as torchtitan's embedding counts
            start = min(rank * size, whole[0])
            return [Box.whole(whole).slab(0, start, min(size, whole[0] - start))]
        case Cut.KV_GROUPS if tp > shape.n_kv_heads:
            sharers = tp // shape.n_kv_heads
            group = _even(name, whole, 0, shape.n_kv_heads, rank // sharers)
            rows = group.shape[0]
            # fused, a group's rows are its queries, then its key and value
            keys = min(rows, 2 * shape.head_dim)
            queries = (rows - keys) // sharers
            shared = group.slab(0, rows - keys, keys)
            own = group.slab(0, rank % sharers * queries, queries)
            return [own, shared] if queries else [shared]
        case Cut.KV_GROUPS | Cut.COLUMN:
            dim = 0
        case Cut.ROW | Cut.EXPERTS_COLUMN:
            dim = 1
        case Cut.EXPERTS_ROW:
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
    """Raise ConfigError unless a generator of ``tp`` ranks can hold a policy of ``shape``; any
    vocabulary fits.
    """
    if expert_parallel and not shape.num_experts:
        raise ConfigError(
            "generator.expert_parallel is True; it must be False where model.num_experts is 0"
        )
    width = "num_experts" if expert_parallel else _width(shape)
    heads = shape.n_heads
    kv_heads = shape.n_kv_heads
    size = getattr(shape, width)
    allowed = [d for d in divisors(heads, size) if kv_heads % d == 0 or d % kv_heads == 0]
    if tp not in allowed:
        raise ConfigError(
            f"generator.tensor_parallel_degree is {tp}; it must divide the model's n_heads={heads} "
            f"and {width}={size}, and divide n_kv_heads={kv_heads} or be a multiple of it: allowed "
            f"are {allowed}"
        )


def _width(shape: ModelShape) -> str:
    """Return the field that is the width of the feed-forward layers."""
    return "moe_hidden_dim" if shape.num_experts else "hidden_dim"


def divisors(*sizes: int) -> list[int]:
    """Return all that divide each of ``sizes``, in order, after as many trials as the square root
    of the least.
    """
    common = math.gcd(*sizes)
    small = [d for d in range(1, math.isqrt(common) + 1) if common % d == 0]
    return sorted({*small, *(common // d for d in small)})


def check_divides(field: str, degree: int, shape: ModelShape) -> None:
    """Raise ConfigError unless ``degree`` divides all that the trainer's tensor parallelism
    cuts.
    """
    names = ("n_heads", "n_kv_heads", "vocab_size", _width(shape))
    sizes = {name: getattr(shape, name) for name in names}
    allowed = divisors(*sizes.values())
    if degree not in allowed:
        listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"{field} is {degree}; it must divide the model's {listed}: allowed are {allowed}"
        )
