"""Arguments of the command line, and messages about unknown names (C5)."""

from typing import get_args

import pytest

from rl.cli import find_config, parse_config
from rl.config import PolicyGradientConfig
from rl.config.algorithm import ALGORITHMS
from rl.errors import ConfigError
from rl.frozen import frozen
from rl.tasks.copy_digits import CopyDigits
from rl.weights.transport import TransportName
from tests.config.command_line import PROGRAM, parse


def test_overrides_reach_nested_fields_as_their_own_type():
    config = parse(
        *(
            "--trainer.parallelism.tensor_parallel_degree",
            "2",
            "--rollout.temperature",
            "0.7",
            "--seed",
            "3",
        ),
        *(
            "--algorithm.loss.clip_high",
            "0.28",
            "--algorithm.loss.reduction",
            "token_mean",
            "--task.digits",
            "4",
        ),
        *(
            "--trainer.optimizer.param_groups.0.optimizer_kwargs.lr",
            "0.01",
            "--model.hf_path",
            "None",
        ),
    )
    assert (
        config.trainer.parallelism.tensor_parallel_degree,
        config.rollout.temperature,
        config.seed,
    ) == (2, 0.7, 3)
    assert (config.algorithm.loss.clip_high, config.algorithm.loss.reduction) == (
        0.28,
        "token_mean",
    )
    assert (config.task.digits, config.model.hf_path) == (4, None)
    assert config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.01
    assert isinstance(config.task, CopyDigits.Config)


@pytest.mark.parametrize(
    "written",
    [
        ["--trainer.micro-batch-size", "7"],
        ["--trainer.micro_batch_size", "7"],
        ["--trainer.micro-batch-size=7"],
        ["--trainer.micro_batch_size=7"],
    ],
)
def test_hyphens_underscores_and_equals_signs_are_one(written):
    assert parse(*written).trainer.micro_batch_size == 7


def test_flags_need_no_value_and_can_be_taken_back():
    config = parse("--resume", "--quiet")
    assert (config.resume, config.quiet) == (True, True)
    config = parse("--no-resume", "--algorithm.advantage.no-normalize-std")
    assert (config.resume, config.quiet, config.algorithm.advantage.normalize_std) == (
        False,
        False,
        False,
    )


@pytest.mark.parametrize("place", [0, 2])
def test_the_config_may_be_named_anywhere_and_with_an_equals_sign(place):
    arguments = ["--seed", "4"]
    arguments.insert(place, "--config=quickstart")
    name, config = parse_config(arguments, program=PROGRAM)
    assert (name, config.seed) == ("quickstart", 4)


def test_the_config_decides_fields_that_are_not_given():
    assert frozen(parse()) == frozen(find_config("quickstart")())


@pytest.mark.parametrize(
    ("written", "near", "siblings"),
    [
        ("--sed", "--seed", "All in the config: algorithm, colocate, critic"),
        (
            "--trainer.micro-batchsize",
            "--trainer.micro_batch_size",
            "All in trainer: trainer.activation_checkpoint",
        ),
        (
            "--trainer.parallelism.tensor_paralel_degree",
            "--trainer.parallelism.tensor_parallel_degree",
            "All in trainer.parallelism: trainer.parallelism.context_parallel_degree",
        ),
        ("--rollot.max_tokens", "--rollout.max_tokens", "All in the config: algorithm"),
        ("--task.digit", "--task.digits", "All in task: task.digits, task.max_prompt_tokens"),
    ],
)
def test_an_unknown_field_is_answered_with_the_nearest_and_its_siblings(written, near, siblings):
    with pytest.raises(ConfigError) as error:
        parse(written, "2")
    message = str(error.value)
    assert message.startswith(
        f"{written.replace('-', '_').replace('__', '--')}: there is no such field; "
    )
    assert near in message.partition("All in")[0]
    assert siblings in message


REFUSED = {
    "--rollout.pipeline determinstic": "--rollout.pipeline is 'determinstic'; did you mean "
    "deterministic? allowed are asynchronous, deterministic",
    "--weights.transport rmda": "--weights.transport is 'rmda'; did you mean rdma? allowed are "
    + ", ".join(sorted(["auto", *get_args(TransportName)])),
    "trainer.float8:liner": "trainer.float8:liner: there is no such option; did you mean "
    "trainer.float8:linear or trainer.float8:none or --trainer.float8? a field is given as --FIELD "
    "VALUE",
    "steps=3": "steps: there is no such option; did you mean --steps? a field is given as --FIELD "
    "VALUE",
    "--steps": "--steps needs a value",
    "--steps two": "--steps: invalid literal for int() with base 10: 'two'",
    "--algorithm dapoo": "--algorithm is 'dapoo'; did you mean dapo or dppo or ppo? allowed are "
    "grpo, dr_grpo, dapo, ppo, decoupled_ppo, rloo, reinforce_plus_plus, gspo, cispo, dppo",
    "--tensor_parallel_degree 2": "--tensor_parallel_degree is the end of several fields; give one "
    "of --trainer.parallelism.tensor_parallel_degree, --generator.tensor_parallel_degree",
}


def test_an_argument_that_cannot_be_read_is_refused_in_a_sentence():
    found = {}
    for arguments in REFUSED:
        with pytest.raises(ConfigError) as error:
            parse(*arguments.split())
        found[arguments] = str(error.value)
    assert found == REFUSED


def test_a_field_may_be_given_by_the_end_of_its_name():
    config = parse("--lr", "0.25", "--micro-batch-size=3", "--no-normalize-std", "--top_p", "0.5")
    assert config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.25
    assert config.critic.optimizer.param_groups[0].optimizer_kwargs["lr"] != 0.25
    assert (config.trainer.micro_batch_size, config.rollout.top_p) == (3, 0.5)
    assert config.algorithm.advantage.normalize_std is False


def test_an_algorithm_is_chosen_by_its_name_and_later_fields_change_it():
    config = parse("--algorithm.loss.clip_low", "0.1", "--algorithm", "dapo")
    loss = config.algorithm.loss
    assert (loss.clip_low, loss.clip_high, loss.reduction) == (0.1, 0.28, "token_mean")
    assert frozen(parse("--algorithm=grpo").algorithm) == frozen(PolicyGradientConfig())
    for name in ALGORITHMS:
        assert parse("--algorithm", name).algorithm == ALGORITHMS[name]()


def test_an_unknown_config_is_answered_with_the_nearest_and_all():
    with pytest.raises(
        ConfigError,
        match=r"--config quikstart: .*did you mean quickstart or tool_quickstart\? .*_jsonl, ",
    ):
        parse(config="quikstart")
    with pytest.raises(
        ConfigError, match=r"--config xyzzy: there is no such config; the configs are dpo_jsonl, "
    ):
        parse(config="xyzzy")


@pytest.mark.parametrize("arguments", [[], ["--seed", "1"], ["--config"]])
def test_a_missing_config_is_answered_with_usage_and_all(arguments):
    with pytest.raises(
        ConfigError, match=r"--config NAME is missing; for example .*\nconfigs: .*quickstart"
    ):
        parse_config(arguments, program=PROGRAM)


def test_a_config_of_another_package_is_found_by_module_and_name(package):
    config = parse("--task.loudness", "3", config=f"{package}.loud")
    assert config.task.loudness == 3.0
    assert frozen(config)["task"]["type"] == "shouting.Shout.Config"
    with pytest.raises(ConfigError, match="--task.loudnes: .*did you mean --task.loudness"):
        parse("--task.loudnes", "3", config=f"{package}.loud")


@pytest.mark.parametrize("name", ["loudd", "RLConfig", "Shout"])
def test_only_functions_that_return_a_run_config_are_configs(package, name):
    with pytest.raises(
        ConfigError,
        match=f"--config {package}.{name}: there is no such config; .*the configs are loud$",
    ):
        parse(config=f"{package}.{name}")


def test_a_function_that_is_named_needs_no_annotation(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text(
        "from configs.quickstart import quickstart\n"
        "def own():\n    return quickstart()\n"
        "def empty():\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert frozen(parse(config="plain.own")) == frozen(parse())
    with pytest.raises(ConfigError, match="plain.empty: .* returned None; it must return a config"):
        parse(config="plain.empty")
    with pytest.raises(ConfigError, match=r"the module has no configs; .* def other\(\) ->"):
        parse(config="plain.other")


def test_torchtitans_parallelism_works_as_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "sharded.py").write_text(
        "from configs.quickstart import quickstart\n"
        "from torchtitan.config import ParallelismConfig\n"
        "def own():\n    config = quickstart()\n"
        "    config.trainer.parallelism = ParallelismConfig(tensor_parallel_degree=2)\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = parse("--trainer.parallelism.tensor_parallel_degree", "2")
    assert frozen(parse(config="sharded.own")) == frozen(given)


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(
        ConfigError,
        match=r"--config no.such.config: cannot import no.such \(.*\); is its folder on PYTHONPATH",
    ):
        parse(config="no.such.config")
