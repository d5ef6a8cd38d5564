"""The planned memory of ranks is that of real engines."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torchtitan.components.lora import LoRAConverter
from torchtitan.distributed.activation_checkpoint import FullAC

from rl.algorithms.advantages import GAE
from rl.cli.arguments import find_config
from rl.config import RLConfig
from rl.model.shape import ModelConfig
from rl.model.shards import Layout, Shard
from rl.plan.memory import RankMemory, all_ranks, pinned, transfer_of
from rl.plan.peak_memory import MemoryOfPasses
from rl.plan.planned_run import PlannedRun
from rl.weights.packed import PackedPublisher, PackedSubscriber
from tests.kit.layouts import LAYOUTS
from tests.kit.ranks import on_ranks
from tests.kit.tables import cases, long
from tests.plan.engines import LENGTH, ROWS, gathered, grown, held, saved, storages

SIZES = {"vocab_size": 2048, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64}
TIED = ModelConfig(**SIZES, dim=256, n_layers=4, hidden_dim=768, max_seq_len=64)
UNTIED = replace(TIED, tie_embeddings=False, fuse_qkv=False)
UNEVEN = replace(TIED, vocab_size=2046, n_kv_heads=4)
EXPERTS = replace(TIED, num_experts=4, experts_per_token=2, moe_hidden_dim=384)
# large against the other growth of a process
LARGE = replace(TIED, dim=512, n_layers=14, hidden_dim=1536)


def config_of(model: ModelConfig, layout: str = "alone") -> RLConfig:
    config = find_config("quickstart")()
    config.model = model
    config.rollout.prompts_per_step = 1
    config.rollout.samples_per_prompt = ROWS
    config.task.max_prompt_tokens = config.rollout.max_tokens = LENGTH // 2
    config.trainer.parallelism = LAYOUTS[layout].parallelism
    config.generator.dtype = "bfloat16"
    return config


CRITIC = config_of(TIED)
CRITIC.algorithm.advantage = GAE.Config()
CRITIC.critic.parallelism = LAYOUTS["tp2"].parallelism
ADAPTED = config_of(TIED, "fsdp2")
ADAPTED.trainer.lora = LoRAConverter.Config(rank=8, alpha=16.0)
ADAPTED_EXPERTS = config_of(EXPERTS, "fsdp2_tp2")
ADAPTED_EXPERTS.trainer.lora = LoRAConverter.Config(rank=8, alpha=16.0)
CASES = {
    "one rank, tied": (config_of(TIED), "trainer"),
    "one rank, untied": (config_of(UNTIED), "trainer"),
    "FSDP 2, untied": (config_of(UNTIED, "fsdp2"), "trainer"),
    "TP 2, tied": (config_of(TIED, "tp2"), "trainer"),
    "FSDP 2 x TP 2, tied, uneven": (config_of(UNEVEN, "fsdp2_tp2"), "trainer"),
    "HSDP 2 x 2": (config_of(TIED, "hsdp4"), "trainer"),
    "CP 2": (config_of(UNTIED, "cp2"), "trainer"),
    "experts, EP 2": (config_of(EXPERTS, "ep2"), "trainer"),
    "adapters, FSDP 2": (ADAPTED, "trainer"),
    "experts with adapters, FSDP 2 x TP 2": (ADAPTED_EXPERTS, "trainer"),
    "critic, TP 2": (CRITIC, "critic"),
}
TOGETHER = [name for name in CASES if name.startswith(("FSDP 2 x", "experts,", "ada"))]
"""Cases of the default tests."""


def bytes_of(rank: RankMemory, name: str) -> int:
    """Return the planned bytes of a rank's item; 0 if the rank has none."""
    return sum(item.bytes for item in rank.named(name))


@pytest.mark.parametrize("case", cases(CASES, TOGETHER))
def test_memory_computed_from_layouts_is_that_of_engines(case, tmp_path):
    config, role = CASES[case]
    planned = [rank for rank in all_ranks(PlannedRun(config)) if rank.role == role]
    measured = on_ranks(len(planned), held, config, role, str(tmp_path))
    padding = 4 * config.model.dim if "uneven" in case else 0  # FSDP's, of one row
    for rank, sizes in zip(planned, measured, strict=True):
        said = {name: bytes_of(rank, name) for name in sizes}
        assert said == pytest.approx(sizes, rel=0, abs=padding)


@pytest.mark.parametrize("delta", [False, True])
def test_both_ends_of_a_push_over_the_network_have_the_planned_memory(delta):
    config = config_of(UNTIED, "fsdp2_tp2")
    config.generator.tensor_parallel_degree = 2
    config.weights.transport = "rdma"
    config.weights.delta = delta
    setting = PlannedRun(config)
    transfer = transfer_of(setting)
    ranks = all_ranks(setting)

    def parts(layout: Layout) -> list[Shard]:
        zeros = partial(torch.zeros, dtype=transfer.dtype)
        return [Shard(region, zeros(region.box.shape)) for region in layout]

    for rank, layout in enumerate(setting.pushed):
        publisher = PackedPublisher(parts(layout), transfer, rank=rank)
        slots = [*publisher._slots, *publisher._deltas]
        size = storages(memory for slot in slots for memory in slot)
        assert size == bytes_of(ranks[rank], "push slots")
        publisher.close()
    for rank, layout in enumerate(setting.wanted):
        subscriber = PackedSubscriber([], parts(layout), transfer, rank=rank)
        size = storages(memory for pair in subscriber._staged.values() for memory in pair)
        assert size == bytes_of(ranks[len(setting.pushed) + rank], "push staging")


@pytest.mark.parametrize("layout", [long("alone"), "fsdp2"])
def test_processes_grow_by_the_planned_memory(layout, tmp_path):
    """Libraries have buffers too, and on several ranks FSDP and gloo keep buffers of a pass."""
    config = config_of(LARGE, layout)
    planned = [rank for rank in all_ranks(PlannedRun(config)) if rank.mesh == "trainer"]
    measured = on_ranks(len(planned), grown, config, str(tmp_path))
    for rank, sizes in zip(planned, measured, strict=True):
        size = {item.name: item.bytes for item in rank.items}
        slack = 2 * size["gathered by FSDP"] if layout != "alone" else 0
        assert sizes["push slots"] == pytest.approx(size["push slots"], rel=0.02)
        for moment, kept in (
            ("with gradients", size["gradients"]),
            ("with states", size["optimizer states"]),
        ):
            least = size["parameters"] + kept
            assert least <= sizes[moment] <= 1.1 * (least + slack)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_one_rank_on_cpu_keeps_all_parameters_gathered(model, dtype, tmp_path):
    config = config_of(model)
    config.trainer.training.mixed_precision_param = dtype
    (size,) = on_ranks(1, gathered, config, str(tmp_path))
    passes = MemoryOfPasses(PlannedRun(config), "trainer")
    assert passes.in_head().gathered + passes.kept == size
    assert passes.peak().gathered >= size


def activations_of(config: RLConfig) -> int:
    return MemoryOfPasses(PlannedRun(config), "trainer").in_head().activations


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "dense"),
        ("bfloat16", "experts"),
        long("float32", "experts"),
        long("bfloat16", "dense"),
    ],
)
def test_planned_activations_are_close_to_what_autograd_saves(name, dtype, tmp_path):
    config = config_of({"dense": TIED, "experts": EXPERTS}[name])
    config.trainer.training.mixed_precision_param = dtype
    (size,) = on_ranks(1, saved, config, str(tmp_path))
    assert activations_of(config) == pytest.approx(size, rel=0.1)


def test_a_float32_head_needs_a_copy_of_its_factors_on_cpu_and_no_rounded_logits():
    config = config_of(TIED)
    config.trainer.training.mixed_precision_param = "bfloat16"

    def logits() -> tuple[int, int]:
        passes = MemoryOfPasses(PlannedRun(config), "trainer")
        chunk, words = passes._chunk()
        return passes.in_head().logits, chunk * words

    rounded, count = logits()
    config.model = replace(TIED, float32_head=True)
    copied, _ = logits()
    chunk = count // TIED.vocab_size
    head = TIED.vocab_size * TIED.dim
    assert copied - rounded == pytest.approx(4 * (head + chunk * TIED.dim) - 2 * count, rel=0.01)


def test_checkpointing_saves_little_more_than_a_layer(tmp_path):
    whole = config_of(TIED)
    whole.trainer.activation_checkpoint = FullAC.Config()
    (size,) = on_ranks(1, saved, whole, str(tmp_path))
    layer = activations_of(config_of(replace(TIED, n_layers=1)))
    assert size < activations_of(whole) < size + layer


def test_pinned_memory_is_rounded_as_torch_rounds_it():
    """The rule is in a header of torch; without a GPU it cannot be called."""
    header = Path(torch.__file__).parent / "include/ATen/core/CachingHostAllocator.h"
    assert "return c10::llvm::PowerOf2Ceil(size);" in header.read_text()
    sizes = [0, 1, 2, 3, 4096, 4097, (1 << 30) + 1]
    assert [*map(pinned, sizes)] == [0, 1, 2, 4, 4096, 8192, 1 << 31]
