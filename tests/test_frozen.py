"""A run's config as JSON, and back."""

import dataclasses
import json

import pytest

from rl.algorithms.advantages import GAE
from rl.algorithms.corrections import TruncatedIS
from rl.algorithms.losses import dapo
from rl.cli import find_config, parse_config, shipped_configs
from rl.config import AlgorithmConfig, RoleConfig, RunConfig, frozen, thawed
from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.tasks.copy_digits import CopyDigits
from rl.tasks.mixture import Mixture, Stage

PROGRAM = "python -m rl.train"


def parse(*overrides: str) -> RunConfig:
    return parse_config(["--config", "quickstart", *overrides], program=PROGRAM)[1]


def test_the_frozen_copy_is_json_with_every_value_in_its_place():
    config = parse(
        "--rollout.temperature", "0.7", "--trainer.parallelism.tensor_parallel_degree", "2", "--output-dir", "x"
    )
    copy = json.loads(json.dumps(frozen(config)))
    assert copy == frozen(config)
    assert set(copy) == {field.name for field in dataclasses.fields(RunConfig)}
    assert copy["trainer"]["parallelism"]["tensor_parallel_degree"] == 2
    assert (copy["rollout"]["temperature"], copy["output_dir"], copy["model"]["hf_path"]) == (0.7, "x", None)
    assert copy["data"] == {"type": "rl.tasks.copy_digits.CopyDigits.Config", "digits": 3, "max_prompt_tokens": 16}
    assert CopyDigits.Config(**{k: v for k, v in copy["data"].items() if k != "type"}) == config.data
    kwargs = copy["trainer"]["optimizer"]["param_groups"][0]["optimizer_kwargs"]
    assert kwargs == {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}


def every_kind_of_part() -> RunConfig:
    """A config with parts of other kinds than its fields name, within lists, tuples and dicts too."""
    config = parse("trainer.lora:on", "trainer.activation-checkpoint:selective", "--trainer.lora.rank", "4")
    config.algorithm = AlgorithmConfig(advantage=GAE.Config(), loss=dapo(), corrections=(TruncatedIS.Config(),))
    config.roles["teacher"] = RoleConfig(model=ModelConfig(dim=128), column="teacher_logprobs")
    config.data = Mixture.Config(
        tasks={"short": CopyDigits.Config(digits=1)},
        weights={"short": 1.0},
        stages=[Stage(first_ordinal=3, weights={"short": 2.0})],
        max_prompt_tokens=16,
    )
    config.slurm.environment["NCCL_DEBUG"] = "WARN"
    return config


@pytest.mark.parametrize("make", [*shipped_configs().values(), every_kind_of_part])
def test_a_frozen_config_becomes_the_config_again(make):
    config = make()
    again = thawed(json.loads(json.dumps(frozen(config))))
    assert frozen(again) == frozen(config)
    assert type(again.algorithm.loss) is type(config.algorithm.loss)
    assert (again.data, again.roles, again.model) == (config.data, config.roles, config.model)
    assert (again.trainer.lora, again.trainer.activation_checkpoint) == (
        config.trainer.lora,
        config.trainer.activation_checkpoint,
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", {"repr": "<a lock>"}, "<a lock> cannot be read from a frozen config"),
        ("data", {"type": "no.such.Task", "digits": 3}, "the frozen config has a no.such.Task, which is not there"),
        ("rollout", {"prompts": 3}, r"has no \['prompts'\]: another version's?"),
    ],
)
def test_a_frozen_config_of_other_code_is_refused(field, value, message):
    with pytest.raises(ConfigError, match=message):
        thawed(frozen(find_config("quickstart")()) | {field: value})


def test_the_frozen_config_of_a_run_can_be_named_as_a_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "quickstart", "config": frozen(parse("--seed", "5"))}))
    name, config = parse_config(["--config", str(path), "--steps", "3"], program=PROGRAM)
    assert (name, config.seed, config.steps) == ("quickstart", 5, 3)
    for wrong, message in ((tmp_path / "none.json", "there is no such file"), (path, "holds no config of a run")):
        path.write_text("{}")
        with pytest.raises(ConfigError, match=message):
            parse_config(["--config", str(wrong)], program=PROGRAM)
