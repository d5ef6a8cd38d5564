"""A run's config as JSON, and back."""

import dataclasses
import json
import sys

import pytest

from rl.algorithms.advantages import GAE
from rl.algorithms.corrections import TruncatedIS
from rl.algorithms.losses import dapo
from rl.cli.arguments import find_config, parse_config, shipped_configs
from rl.config import PolicyGradientConfig, RLConfig, RoleConfig, ServeConfig
from rl.config.frozen import changed_fields, frozen, thawed
from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.tasks.copy_digits import CopyDigits
from rl.tasks.mixture import Mixture, Stage
from tests.kit.command_line import parse_line


def test_the_frozen_copy_is_json_with_every_value_in_its_place():
    config = parse_line(
        "--rollout.temperature 0.7 --trainer.parallelism.tensor_parallel_degree 2 --output-dir x"
    )
    copy = json.loads(json.dumps(frozen(config)))
    assert copy == frozen(config)
    assert set(copy) == {"type", *(field.name for field in dataclasses.fields(RLConfig))}
    assert copy["trainer"]["parallelism"]["tensor_parallel_degree"] == 2
    assert (copy["rollout"]["temperature"], copy["output_dir"]) == (0.7, "x")
    assert copy["model"]["hf_path"] is None
    task = {"type": "rl.tasks.copy_digits.CopyDigits.Config", "digits": 3, "max_prompt_tokens": 16}
    assert copy["task"] == task
    kwargs = copy["trainer"]["optimizer"]["param_groups"][0]["optimizer_kwargs"]
    assert kwargs == {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}


def every_kind_of_part() -> RLConfig:
    """A config with parts of other kinds than its fields name, also within lists and dicts."""
    config = parse_line(
        "trainer.lora:on trainer.activation-checkpoint:selective --trainer.lora.rank 4"
    )
    config.algorithm = PolicyGradientConfig(
        advantage=GAE.Config(), loss=dapo(), corrections=(TruncatedIS.Config(),)
    )
    config.roles["teacher"] = RoleConfig(model=ModelConfig(dim=128), column="teacher_logprobs")
    config.task = Mixture.Config(
        tasks={"short": CopyDigits.Config(digits=1)},
        weights={"short": 1.0},
        stages=[Stage(first_prompt_id=3, weights={"short": 2.0})],
        max_prompt_tokens=16,
    )
    config.slurm.environment["NCCL_DEBUG"] = "WARN"
    return config


@pytest.mark.parametrize("make", [*shipped_configs().values(), every_kind_of_part])
def test_a_frozen_config_becomes_the_config_again(make):
    config = make()
    again = thawed(json.loads(json.dumps(frozen(config))))
    assert frozen(again) == frozen(config)
    assert type(again) is type(config)
    assert again.model == config.model
    if not isinstance(config, ServeConfig):
        assert again.task == config.task
    if isinstance(config, RLConfig):
        assert type(again.algorithm.loss) is type(config.algorithm.loss)
        assert again.roles == config.roles
    assert (again.trainer.lora, again.trainer.activation_checkpoint) == (
        config.trainer.lora,
        config.trainer.activation_checkpoint,
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", {"repr": "<a lock>"}, "<a lock> cannot be read from a frozen config"),
        ("rollout", {"prompts": 3}, r"rollout has the fields \['prompts'\], which RolloutConfig"),
    ],
)
def test_a_frozen_config_of_other_code_is_refused(field, value, message):
    with pytest.raises(ConfigError, match=message):
        thawed(frozen(find_config("quickstart")()) | {field: value})


def test_the_frozen_config_of_a_run_can_be_named_as_a_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "quickstart", "config": frozen(parse_line("--seed 5"))}))
    name, config = parse_config(["--config", str(path), "--steps", "3"], program="test")
    assert (name, config.seed, config.steps) == ("quickstart", 5, 3)


PARTS = """
import pathlib
from dataclasses import dataclass
from rl.tasks.copy_digits import CopyDigits
pathlib.Path(__file__).with_suffix(".imported").touch()
class Bare:
    class Config:
        pass
class Other:
    class Config(dict):
        pass
class Mine(CopyDigits):
    @dataclass(kw_only=True, slots=True)
    class Config(CopyDigits.Config):
        pass
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A module of a user; its path, with another suffix, tells whether it was imported."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"parts_{tmp_path.name}".replace("-", "_")
    path = tmp_path / f"{name}.py"
    path.write_text(PARTS)
    yield path
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "inner",
    ["", ".pathlib", "_of_others.Config", ".Bare.Config", ".Mine.Confg", ".CopyDigits.Config"],
)
def test_no_module_is_imported_that_defines_no_such_config_class(parts, inner):
    data = frozen(find_config("quickstart")()) | {"task": {"type": parts.stem + inner}}
    with pytest.raises(ConfigError, match="config.task: there is no config class"):
        thawed(data)
    assert not parts.with_suffix(".imported").exists()


@pytest.mark.parametrize(
    "path", ["this", "os.system", "antigravity", "subprocess.Popen", "", 3, None]
)
def test_names_of_other_things_are_refused_without_importing_them(path, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(ConfigError, match=r"config\.task"):
        thawed(frozen(find_config("quickstart")()) | {"task": {"type": path}})
    assert not {"this", "antigravity"} & sys.modules.keys()


def test_only_a_part_of_the_kind_that_the_field_takes_is_made(parts):
    data = frozen(find_config("quickstart")())
    with pytest.raises(ConfigError, match="config.task.type is .*; it must name a Task.Config"):
        thawed(data | {"task": {"type": f"{parts.stem}.Other.Config"}})
    with pytest.raises(ConfigError, match="type is .*GAE.Config'; it must name a Task.Config"):
        thawed(data | {"task": frozen(GAE.Config())})
    mine = thawed(data | {"task": {"type": f"{parts.stem}.Mine.Config", "digits": 2}})
    assert type(mine.task).__qualname__ == "Mine.Config"
    assert mine.task.digits == 2


def test_a_variable_with_the_name_type_is_only_a_variable():
    config = find_config("quickstart")()
    config.slurm.environment["type"] = "os.system"
    assert thawed(frozen(config)).slurm.environment == {"type": "os.system"}


def test_a_field_that_an_older_version_did_not_have_differs_if_it_is_not_the_default():
    config = RLConfig(task=CopyDigits.Config(), model=ModelConfig(dim=128))
    before = frozen(config)
    del before["parity"], before["rollout"]["oversampling"], before["task"]["digits"]
    assert changed_fields(before, config) == {}
    config.rollout.oversampling = 2.0
    config.model.dim = 64
    assert changed_fields(before, config) == {
        "rollout.oversampling": "None → 2.0",
        "model.dim": "128 → 64",
    }
