"""The table covers every parameter of every model, and the ranks hold all of each."""

import pytest
import torch

from rl.errors import ConfigError
from rl.model.decoder import parameter_shapes
from rl.model.shape import ModelConfig, ModelShape, shape_of
from rl.model.shards import Box, Layout, local_shapes, local_shards
from rl.model.tp_plan import Cut, check_divides, check_generator, cut_of, divisors, generator_layout

SIZES = {
    "vocab_size": 26,
    "dim": 16,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 4,
    "hidden_dim": 40,
}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "moe_hidden_dim": 12}
CLAMPED = EXPERTS | {"family": "gpt_oss"}


def shape_with(**changes) -> ModelShape:
    return shape_of(ModelConfig(**SIZES | changes))


FORMS = pytest.mark.parametrize(
    ("tied", "fused", "experts"),
    [
        (True, True, {}),
        (True, False, {}),
        (False, True, {}),
        (False, False, {}),
        (True, True, EXPERTS),
        (True, False, CLAMPED),
    ],
)


@FORMS
def test_every_parameter_has_one_cut_and_cut_weights_are_large(tied, fused, experts):
    shapes = parameter_shapes(shape_with(tie_embeddings=tied, **experts), fuse_qkv=fused)
    cuts = {name: cut_of(name) for name in shapes}
    replicated = {name for name, cut in cuts.items() if cut is Cut.REPLICATED}
    assert replicated == {name for name in cuts if "norm" in name or "router" in name}
    assert any("experts" in name for name in cuts) == bool(experts)
    assert ("lm_head.weight" in cuts) == (not tied)
    assert any(name.endswith("wqkv.weight") for name in cuts) == fused


@FORMS
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_ranks_together_hold_each_element_and_share_equal_regions_only(
    tied, fused, experts, tp
):
    wide = experts | {"moe_hidden_dim": 16} if experts else {}
    shape = shape_with(tie_embeddings=tied, **wide)
    layouts = generator_layout(shape, fuse_qkv=fused, tp=tp)
    assert_whole(layouts, parameter_shapes(shape, fuse_qkv=fused))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("experts", [EXPERTS, CLAMPED], ids=["plain", "clamped"])
def test_ranks_can_divide_whole_experts(tp, experts):
    shape = shape_with(**experts)
    layouts = generator_layout(shape, fuse_qkv=True, tp=tp, expert_parallel=True)
    assert_whole(layouts, parameter_shapes(shape, fuse_qkv=True))
    held = {region.box.shape for layout in layouts for region in layout if "experts" in region.name}
    clamped = {(16, 24), (24,), (12, 16), (16,)}
    sizes = {(12, 16), (16, 12)} if experts is EXPERTS else clamped
    assert held == {(4 // tp, *size) for size in sizes}


def assert_whole(layouts: tuple[Layout, ...], shapes: dict[str, tuple[int, ...]]) -> None:
    boxes: dict[str, set[Box]] = {name: set() for name in shapes}
    for name, shape, box in {region for layout in layouts for region in layout}:
        assert shape == shapes[name]
        boxes[name].add(box)
    for name, shape in shapes.items():
        covered = torch.zeros(shape, dtype=torch.int)
        for box in boxes[name]:
            covered[box.slices_in(Box.whole(shape))] += 1
        assert (covered == 1).all(), name


def attention_rows(fused: bool, tp: int) -> list[dict[str, list[str]]]:
    """Return the heads of the rows of each parameter, by rank, in the rank's order."""
    q = [f"q{head}" for head in range(8)]
    whole = (
        {"wqkv": [*q[:4], "k0", "v0", *q[4:], "k1", "v1"]}
        if fused
        else {"wq": q, "wk": ["k0", "k1"], "wv": ["v0", "v1"]}
    )
    ranks = []
    for layout in generator_layout(shape_with(), fuse_qkv=fused, tp=tp):
        rows: dict[str, list[str]] = {}
        for name, _, box in layout:
            if name.startswith("layers.1.attention.qkv_linear"):
                kind = name.split(".")[-2]
                assert box.offset[0] % 4 == box.shape[0] % 4 == 0
                rows.setdefault(kind, []).extend(
                    whole[kind][box.offset[0] // 4 : (box.offset[0] + box.shape[0]) // 4]
                )
        ranks.append(rows)
    return ranks


def test_ranks_that_share_a_kv_head_divide_its_queries():
    groups = [[f"q{n}", f"q{n + 1}", f"k{n // 4}", f"v{n // 4}"] for n in (0, 2, 4, 6)]
    assert attention_rows(fused=True, tp=4) == [{"wqkv": heads} for heads in groups]
    apart = [{"wq": heads[:2], "wk": heads[2:3], "wv": heads[3:]} for heads in groups]
    assert attention_rows(fused=False, tp=4) == apart


def test_one_kv_head_of_each_rank_keeps_its_queries():
    assert attention_rows(fused=True, tp=2)[1] == {"wqkv": ["q4", "q5", "q6", "q7", "k1", "v1"]}
    assert attention_rows(fused=True, tp=8)[5] == {"wqkv": ["q5", "k1", "v1"]}


@pytest.mark.parametrize(
    ("vocabulary", "rows"), [(26, [7, 7, 7, 5]), (9, [3, 3, 3, 0]), (5, [2, 2, 1, 0])]
)
def test_the_last_ranks_have_less_of_an_uneven_vocabulary(vocabulary, rows):
    layouts = generator_layout(shape_with(vocab_size=vocabulary), fuse_qkv=True, tp=4)
    assert [layout[0].box.shape for layout in layouts] == [(n, 16) for n in rows]
    assert_whole(layouts, parameter_shapes(shape_with(vocab_size=vocabulary), fuse_qkv=True))


@pytest.mark.parametrize("fused", [True, False])
def test_parts_are_views_that_fill_a_tensor_from_above(fused):
    layouts = generator_layout(shape_with(), fuse_qkv=fused, tp=4)
    for layout in layouts:
        tensors = {
            name: torch.zeros(shape, dtype=torch.int)
            for name, shape in local_shapes(layouts[0]).items()
        }
        for shard in local_shards(tensors, layout):
            assert shard.tensor.shape == shard.box.shape
            shard.tensor.add_(1)
        assert all(tensor.max() == 1 for tensor in tensors.values())
        holes = {name: int((tensor == 0).sum()) for name, tensor in tensors.items()}
        padding = {"tok_embeddings.weight": 2 * 16} if layout is layouts[-1] else {}
        assert {name: count for name, count in holes.items() if count} == padding


@pytest.mark.parametrize(
    "name",
    ["layers.0.attention.scales", "layers.0.moe.shared_experts.w4.weight", "norms.weight", ""],
)
def test_a_parameter_without_a_cut_is_named(name):
    with pytest.raises(KeyError, match=f"no line for parameter '{name}'"):
        cut_of(name)


def test_an_uneven_cut_is_refused():
    with pytest.raises(
        ValueError,
        match=r"layers.0.feed_forward.w1.weight: dimension 0 of \(42, 16\) .* 4 equal parts",
    ):
        generator_layout(shape_with(hidden_dim=42), fuse_qkv=False, tp=4)


TWELVE = {"n_heads": 12, "n_kv_heads": 4, "hidden_dim": 12}


@pytest.mark.parametrize(
    ("changes", "refused", "message"),
    [
        ({}, (0, 3, 5, 16, -1), r"n_heads=8 and hidden_dim=40, .*n_kv_heads=2 .*\[1, 2, 4, 8\]"),
        ({"hidden_dim": 20}, (8,), r"hidden_dim=20, .*allowed are \[1, 2, 4\]"),
        (TWELVE, (3, 6), r"n_kv_heads=4 or .*allowed are \[1, 2, 4, 12\]"),
        (EXPERTS | {"moe_hidden_dim": 6}, (4,), r"moe_hidden_dim=6, .*allowed are \[1, 2\]"),
    ],
)
def test_degrees_of_a_generator_that_do_not_fit_are_refused_with_those_that_do(
    changes, refused, message
):
    for tp in refused:
        wanted = rf"generator.tensor_parallel_degree is {tp}; .*{message}"
        with pytest.raises(ConfigError, match=wanted):
            check_generator(tp, shape_with(**changes), expert_parallel=False)


@pytest.mark.parametrize(
    "changes", [{}, {"n_heads": 12, "n_kv_heads": 4, "hidden_dim": 24}, EXPERTS]
)
def test_every_degree_that_is_allowed_has_a_layout(changes):
    shape = shape_with(**changes)
    for tp in range(1, shape.n_heads + 1):
        try:
            check_generator(tp, shape, expert_parallel=False)
        except ConfigError:
            continue
        assert len(generator_layout(shape, fuse_qkv=True, tp=tp)) == tp


def test_expert_parallel_degree_must_divide_the_experts():
    check_generator(4, shape_with(**EXPERTS | {"moe_hidden_dim": 5}), expert_parallel=True)
    message = r"degree is 8; .*num_experts=4, .*allowed are \[1, 2, 4\]"
    with pytest.raises(ConfigError, match=message):
        check_generator(8, shape_with(**EXPERTS), expert_parallel=True)
    message = "generator.expert_parallel is True; it must be False if model.num_experts is 0"
    with pytest.raises(ConfigError, match=message):
        check_generator(1, shape_with(), expert_parallel=True)


DENSE_SIZES = "n_heads=8, n_kv_heads=2, vocab_size=26, hidden_dim=40"
OF_EXPERTS = EXPERTS | {"n_kv_heads": 4, "vocab_size": 24, "moe_hidden_dim": 6}


@pytest.mark.parametrize(
    ("changes", "degrees", "sizes"),
    [({}, (0, 3, 4, -1), DENSE_SIZES), (OF_EXPERTS, (4,), "moe_hidden_dim=6")],
)
def test_degrees_of_the_trainer_that_do_not_divide_the_model_are_refused(changes, degrees, sizes):
    shape = shape_with(**changes)
    for allowed in (1, 2):
        check_divides("some.field", allowed, shape)
    for degree in degrees:
        message = rf"some.field is {degree}; .*{sizes}: allowed are \[1, 2\]"
        with pytest.raises(ConfigError, match=message):
            check_divides("some.field", degree, shape)


def test_divisors_of_absurd_sizes_are_found_at_once():
    assert divisors(12, 18) == [1, 2, 3, 6]
    assert divisors(1) == [1]
    assert divisors(2**40, 10**12) == [2**power for power in range(13)]
    with pytest.raises(ConfigError, match="generator.tensor_parallel_degree is 7; it must divide"):
        check_generator(7, shape_with(n_heads=10**12), expert_parallel=False)
