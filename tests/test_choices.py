"""Kinds of parts of the trainer, chosen on the command line."""

import pytest
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from rl.cli.arguments import find_config
from rl.config import RLConfig
from tests.kit.command_line import parse, parse_line

FRUGAL = f"{__name__}.frugal"


def frugal() -> RLConfig:
    """A config with choices of its own."""
    config = find_config("quickstart")()
    config.trainer.activation_checkpoint = FullAC.Config()
    config.trainer.float8 = Float8LinearConverter.Config(emulate=True)
    return config


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("full", FullAC.Config()),
        ("selective", SelectiveAC.Config()),
        ("memory-budget", MemoryBudgetAC.Config()),
        ("none", None),
    ],
)
def test_activation_checkpointing_is_chosen_by_name(choice, chosen):
    config = parse(f"trainer.activation-checkpoint:{choice}", "--trainer.compile.enable")
    assert config.trainer.activation_checkpoint == chosen


def test_fields_may_stand_on_either_side_of_a_choice():
    config = parse_line(
        "--steps 7 trainer.activation_checkpoint:selective --trainer.activation_checkpoint.debug "
        "trainer.float8:linear --seed 3 --trainer.float8.emulate --trainer.float8.filter-fqns wo,w2"
    )
    assert (config.steps, config.seed) == (7, 3)
    assert config.trainer.activation_checkpoint == SelectiveAC.Config(debug=True)
    float8 = Float8LinearConverter.Config(emulate=True, filter_fqns=["wo", "w2"])
    assert config.trainer.float8 == float8
    assert parse().trainer.float8 is None


def test_adapters_are_switched_on_by_name():
    config = parse_line(
        "trainer.lora:on --trainer.lora.rank 4 --trainer.lora.target-modules wqkv,w2"
    )
    assert config.trainer.lora == LoRAConverter.Config(rank=4, target_modules=["wqkv", "w2"])
    assert parse("trainer.lora:on").trainer.lora == LoRAConverter.Config()
    assert parse("trainer.lora:none").trainer.lora is None
    assert parse().trainer.lora is None


def test_a_part_chosen_on_the_command_line_has_its_own_fields():
    config = parse_line(
        "trainer.activation-checkpoint:memory-budget "
        "--trainer.activation-checkpoint.memory-budget 0.3 "
        "trainer.float8:none --trainer.compile.enable",
        config=FRUGAL,
    )
    assert config.trainer.activation_checkpoint == MemoryBudgetAC.Config(memory_budget=0.3)
    assert config.trainer.float8 is None
    config = parse("--trainer.float8.filter-fqns", "wo", config=FRUGAL)
    assert config.trainer.float8 == Float8LinearConverter.Config(emulate=True, filter_fqns=["wo"])


def test_a_gpu_of_the_right_kind_computes_in_float8_itself(monkeypatch):
    monkeypatch.setattr(
        "rl.session.hardware.has_cuda_capability", lambda major, minor: (major, minor) <= (8, 9)
    )
    assert not parse("trainer.float8:linear", "--trainer.compile.enable").trainer.float8.emulate
