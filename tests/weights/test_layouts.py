"""Any trainer layout pushes to any generator layout bit for bit; layouts need no ranks."""

import resource

import pytest
import torch.distributed as dist
from torchtitan.components.lora import LoRAConverter

from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Layout
from rl.model.tp_plan import generator_layout
from rl.training.layout import trainer_layout
from rl.training.trainer_config import TrainerConfig
from rl.weights.routes import plan_push
from tests.kit.layouts import Layout as TrainerLayout
from tests.kit.ranks import on_ranks
from tests.kit.tables import long
from tests.weights.pushes import MODELS, TRAINERS, push_all

CASES = [
    (model, layout)
    for layout, degrees in TRAINERS.items()
    for model, config in MODELS.items()
    if config.num_experts or degrees.ep == 1
]
RANKS = sorted({layout.ranks for layout in TRAINERS.values()})
TOGETHER = [
    ("tied_fused", "fsdp2_tp2"),
    ("untied_split", "cp2_tp2"),
    ("untied_fused", "hsdp4"),
    ("tied_split", "fsdp4"),
    ("biased", "fsdp2_tp2"),
    ("biased_split", "cp2_tp2"),
    ("experts", "fsdp2_tp2"),
    ("untied_split_experts", "fsdp2_tp2_ep2"),
    ("clamped", "fsdp2_tp2"),
]
"""Cases of four ranks that hold every dimension. The product is for the long tests."""


def planned(model: str, layout: str) -> tuple[Layout, ...]:
    return trainer_layout(TrainerConfig(parallelism=TRAINERS[layout].parallelism), MODELS[model])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(TOGETHER, id="together"),
        *(
            long([case for case in CASES if TRAINERS[case[1]].ranks == ranks], id=f"{ranks} ranks")
            for ranks in RANKS
        ),
    ],
)
def pushed(request, tmp_path_factory) -> dict[tuple[str, str], list[Layout]]:
    """Return the layouts of all ranks by (model, trainer layout), after checked pushes."""
    cases = request.param
    folder = str(tmp_path_factory.mktemp("pushed"))
    ranks = on_ranks(TRAINERS[cases[0][1]].ranks, push_all, cases, folder)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


# Qwen3-30B-A3B.
LARGE = ModelConfig(
    vocab_size=151936,
    dim=2048,
    n_layers=48,
    n_heads=32,
    n_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    moe_hidden_dim=768,
    tie_embeddings=False,
)


def test_every_reader_holds_its_shards_of_every_version_bit_for_bit(pushed):
    assert len(pushed) >= 6


def test_the_layout_planned_without_ranks_is_that_of_the_ranks(pushed):
    for case, held in pushed.items():
        assert planned(*case) == held, case
    assert not dist.is_initialized()


def test_adapters_do_not_change_the_layout():
    config = TrainerConfig(
        parallelism=TRAINERS["fsdp2_tp2"].parallelism, lora=LoRAConverter.Config()
    )
    assert trainer_layout(config, MODELS["tied_fused"]) == planned("tied_fused", "fsdp2_tp2")


def test_a_large_plan_takes_little_memory_and_balances_replicas():
    """30 billion parameters, HSDP2x8 with TP4 and EP8, to eight ranks with whole experts."""
    parallelism = TrainerLayout(replicate=2, shard=8, tp=4, ep=8).parallelism
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = trainer_layout(TrainerConfig(parallelism=parallelism), LARGE)
    wanted = generator_layout(shape_of(LARGE), fuse_qkv=True, tp=8, expert_parallel=True)
    plan = plan_push(held, wanted)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert sum(region.box.numel for region in held[0]) < 1.1 * 30.53e9 / 32
    for elements, layout in zip(plan.elements(), wanted, strict=True):
        assert elements.total() == sum(region.box.numel for region in layout)
        halves = [sum(elements[rank] for rank in range(first, first + 32)) for first in (0, 32)]
        assert halves[0] == pytest.approx(halves[1], rel=0.05)


def test_planning_in_a_process_with_a_process_group_is_refused():
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="call it in a process without a process group"):
            planned("tied_fused", "alone")
    finally:
        dist.destroy_process_group()
