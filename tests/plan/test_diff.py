"""Which fields two configs differ in, and whether a run's numbers change with them."""

import json

import pytest
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from rl.cli import find_config, shipped_configs
from rl.config import RLConfig, RoleConfig
from rl.frozen import frozen
from rl.plan.__main__ import main
from rl.plan.diff import changes, leaves, mark_of


def with_everything() -> RLConfig:
    """A config in which all that can be left out is there."""
    config = find_config("quickstart")()
    config.trainer.lora = LoRAConverter.Config()
    config.trainer.float8 = Float8LinearConverter.Config()
    config.roles["teacher"] = RoleConfig(model=config.model)
    return config


@pytest.mark.parametrize(
    "checkpointing", [None, FullAC.Config(), SelectiveAC.Config(), MemoryBudgetAC.Config()]
)
def test_every_field_has_a_mark(checkpointing):
    config = with_everything()
    config.trainer.activation_checkpoint = checkpointing
    configs = [config, *(make() for make in shipped_configs().values())]
    assert {mark_of(field) for each in configs for field in leaves(frozen(each))} == {
        "numerics",
        "performance",
        "cosmetic",
    }


def test_a_field_without_a_mark_is_named():
    with pytest.raises(KeyError, match="rollout.something_new: rl.plan.diff has no mark for it"):
        mark_of("rollout.something_new")


@pytest.mark.parametrize(
    ("field", "mark"),
    [
        ("seed", "numerics"),
        ("rollout.max_staleness", "numerics"),
        ("trainer.training.mixed_precision_param", "numerics"),
        ("critic.optimizer.param_groups", "numerics"),
        ("model.dim", "numerics"),
        ("trainer.debug.seed", "numerics"),
        ("model.attention", "performance"),
        ("trainer.parallelism.tensor_parallel_degree", "performance"),
        ("roles.teacher.parallelism.tensor_parallel_degree", "performance"),
        ("trainer.activation_checkpoint", "performance"),
        ("trainer.checkpoint.async_mode", "performance"),
        ("generator.replicas", "performance"),
        ("trainer.checkpoint.interval", "cosmetic"),
        ("trainer.debug.print_config", "cosmetic"),
        ("output_dir", "cosmetic"),
    ],
)
def test_marks_say_what_a_change_does(field, mark):
    assert mark_of(field) == mark


def test_what_changes_the_numbers_comes_first():
    before = find_config("quickstart")()
    after = find_config("quickstart")()
    after.quiet = True
    after.trainer.packing = False
    after.seed = 1
    assert [(change.mark, change.change) for change in changes(before, after)] == [
        ("numerics", "seed: 0 → 1"),
        ("performance", "trainer.packing: True → False"),
        ("cosmetic", "quiet: False → True"),
    ]


def test_more_nodes_for_a_recipe_change_no_number(capsys):
    assert main(["--config", "qwen3_8b", "--diff", "qwen3_8b_2_nodes", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["changes"] and {change["mark"] for change in said["changes"]} == {"performance"}


def test_a_difference_is_told_to_people_under_its_mark(capsys):
    assert main(["--config", "quickstart", "--seed", "3", "--diff", "quickstart"]) == 0
    assert capsys.readouterr().out == "quickstart → quickstart\n\nnumerics\n  seed: 3 → 0\n"
    assert main(["--config", "quickstart", "--diff", "quickstart"]) == 0
    assert capsys.readouterr().out == "quickstart and quickstart are the same\n"
    assert main(["--config", "quickstart", "--diff", "quickstar"]) == 2
    assert "did you mean quickstart?" in capsys.readouterr().err
