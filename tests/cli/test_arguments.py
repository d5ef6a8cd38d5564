"""Arguments of the command line, and messages about unknown names (C5)."""

from dataclasses import replace
from typing import get_args

import pytest

from rl.cli.arguments import find_config, parse_config
from rl.config import PolicyGradientConfig
from rl.config.algorithm import ALGORITHMS
from rl.config.frozen import frozen
from rl.errors import ConfigError
from rl.tasks.copy_digits import CopyDigits
from rl.weights.transport import TransportName
from tests.kit.command_line import PROGRAM, parse, parse_line
from tests.kit.tables import cases, check_rows


def test_overrides_reach_nested_fields_as_their_own_type():
    config = parse_line(
        "--trainer.parallelism.tensor_parallel_degree 2 --rollout.temperature 0.7 --seed 3 "
        "--algorithm.loss.clip_high 0.28 --algorithm.loss.reduction token_mean --task.digits 4 "
        "--trainer.optimizer.param_groups.0.optimizer_kwargs.lr 0.01 --model.hf_path None"
    )
    assert config.trainer.parallelism.tensor_parallel_degree == 2
    assert (config.rollout.temperature, config.seed) == (0.7, 3)
    assert (config.algorithm.loss.clip_high, config.algorithm.loss.reduction) == (
        0.28,
        "token_mean",
    )
    assert (config.task, config.model.hf_path) == (replace(config.task, digits=4), None)
    assert config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.01
    assert isinstance(config.task, CopyDigits.Config)


@pytest.mark.parametrize("sign", [" ", "="])
@pytest.mark.parametrize("name", ["micro-batch-size", "micro_batch_size"])
def test_hyphens_underscores_and_equals_signs_are_one(name, sign):
    assert parse_line(f"--trainer.{name}{sign}7").trainer.micro_batch_size == 7


def test_flags_need_no_value_and_can_be_taken_back():
    config = parse("--resume", "--quiet")
    assert (config.resume, config.quiet) == (True, True)
    config = parse("--no-resume", "--algorithm.advantage.no-normalize-std")
    assert not config.resume and not config.quiet
    assert not config.algorithm.advantage.normalize_std


@pytest.mark.parametrize(
    ("arguments", "resume", "quiet"),
    [
        ("--resume True --quiet=False", True, False),
        ("--resume=true --quiet True --no-quiet", True, False),
        ("--resume false --quiet trainer.float8:none", False, True),
    ],
)
def test_flags_may_have_a_value(arguments, resume, quiet):
    config = parse(*arguments.split(), "--weights.delta", "--prefix-caching", "False")
    assert (config.resume, config.quiet, config.weights.delta) == (resume, quiet, True)
    assert not config.generator.prefix_caching


@pytest.mark.parametrize("place", [0, 2])
def test_the_config_may_be_named_anywhere_and_with_an_equals_sign(place):
    arguments = ["--seed", "4"]
    arguments.insert(place, "--config=quickstart")
    name, config = parse_config(arguments, program=PROGRAM)
    assert (name, config.seed) == ("quickstart", 4)


def test_the_config_decides_fields_that_are_not_given():
    assert frozen(parse()) == frozen(find_config("quickstart")())


UNKNOWN = {
    "sed": ("seed", "the config: algorithm, best, colocate, critic"),
    "trainer.micro_batchsize": ("trainer.micro_batch_size", "trainer: trainer.activation_checkpo"),
    "trainer.parallelism.tensor_paralel_degree": (
        "trainer.parallelism.tensor_parallel_degree",
        "trainer.parallelism: trainer.parallelism.context_parallel_degree",
    ),
    "rollot.max_tokens": ("rollout.max_tokens", "the config: algorithm"),
    "task.digit": ("task.digits", "task: task.digits, task.max_prompt_tokens"),
}


def test_an_unknown_field_is_answered_with_the_nearest_and_its_siblings():
    def check(written: str) -> None:
        near, siblings = UNKNOWN[written]
        said = f"^--{written}: there is no such field; .*--{near}[^\n]*\nAll in {siblings}"
        with pytest.raises(ConfigError, match=said):
            parse(f"--{written}", "2")

    check_rows(UNKNOWN, check)


REFUSED = {
    "--rollout.pipeline determinstic": "--rollout.pipeline is 'determinstic'; did you mean "
    "deterministic? allowed are asynchronous, deterministic",
    "--weights.transport rmda": "--weights.transport is 'rmda'; did you mean rdma? allowed are "
    + ", ".join(sorted(["auto", *get_args(TransportName)])),
    "trainer.float8:liner": "trainer.float8:liner: there is no such option; did you mean "
    "trainer.float8:linear or trainer.float8:none or --trainer.float8? a field is given as --FIELD "
    "VALUE",
    "steps=3": "steps: there is no such option; did you mean --steps or --profile.steps or "
    "--best.keep? a field is given as --FIELD VALUE",
    "--steps": "--steps needs a value",
    "--steps two": "--steps is 'two'; it must be a whole number",
    "--max-tokens=1e3": "--rollout.max_tokens is '1e3'; it must be a whole number",
    "--trainer.threads few": "--trainer.threads is 'few'; it must be a whole number or 'auto'",
    "--quiet yes": "--quiet is 'yes'; it must be True or False",
    "--trainer.dither=1": "--trainer.dither is '1'; it must be True or False",
    "--trainer.enable True": "--trainer.enable stands for several fields; give one of "
    "--trainer.compile.enable, --trainer.checkpoint.enable",
    "--algorithm dapoo": "--algorithm is 'dapoo'; did you mean dapo or sapo or gdpo? allowed are "
    "grpo, dr_grpo, dapo, ppo, decoupled_ppo, rloo, reinforce_plus_plus, gspo, cispo, dppo, "
    "sapo, gmpo, maxrl, gdpo",
    "--tensor_parallel_degree 2": "--tensor_parallel_degree stands for several fields; give one of "
    "--trainer.parallelism.tensor_parallel_degree, --generator.tensor_parallel_degree",
}


def test_an_argument_that_cannot_be_read_is_refused_in_a_sentence():
    def check(arguments: str) -> None:
        with pytest.raises(ConfigError) as error:
            parse_line(arguments)
        assert str(error.value) == REFUSED[arguments]

    check_rows(REFUSED, check)


def test_a_value_that_a_dataclass_of_torchtitan_refuses_is_refused():
    with pytest.raises(ConfigError, match="trainer.checkpoint"):
        parse_line("--trainer.checkpoint.keep_latest_k 1")


def test_a_field_may_be_given_by_the_end_of_its_name():
    config = parse_line("--lr 0.25 --micro-batch-size=3 --no-normalize-std --top_p 0.5")
    assert parse_line("--trainer.optimizer.lr 0.25").trainer == parse_line("--lr 0.25").trainer
    assert config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.25
    assert config.critic.optimizer.param_groups[0].optimizer_kwargs["lr"] != 0.25
    assert (config.trainer.micro_batch_size, config.rollout.top_p) == (3, 0.5)
    assert config.algorithm.advantage.normalize_std is False


def test_an_algorithm_is_chosen_by_its_name_and_later_fields_change_it():
    config = parse_line("--algorithm.loss.clip_low 0.1 --algorithm dapo")
    loss = config.algorithm.loss
    assert (loss.clip_low, loss.clip_high, loss.reduction) == (0.1, 0.28, "token_mean")
    assert frozen(parse("--algorithm=grpo").algorithm) == frozen(PolicyGradientConfig())


@pytest.mark.parametrize("name", cases(ALGORITHMS, ["gspo"]))
def test_every_algorithm_is_chosen_by_its_name(name):
    assert parse("--algorithm", name).algorithm == ALGORITHMS[name]()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--config quikstart", r"did you mean quickstart or tool_quickstart\? .*_jsonl, "),
        ("--config xyzzy", "there is no such config; the configs are aime_2024, "),
        ("--config no.such.config", r"cannot import no.such \(.*\); is its folder on PYTHONPATH"),
        *(
            (given, r"--config NAME is missing; for example .*\nconfigs: (.|\n)*quickstart")
            for given in ("", "--seed 1", "--config")
        ),
    ],
)
def test_a_config_that_is_unknown_or_missing_is_answered_with_all(arguments, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(arguments.split(), program=PROGRAM)


def test_a_config_of_another_package_is_found_by_module_and_name(package):
    config = parse("--task.loudness", "3", config=f"{package}.loud")
    assert config.task.loudness == 3.0
    assert frozen(config)["task"]["type"] == "shouting.Shout.Config"
    with pytest.raises(ConfigError, match="--task.loudnes: .*did you mean --task.loudness"):
        parse("--task.loudnes", "3", config=f"{package}.loud")


@pytest.mark.parametrize("name", ["loudd", "RLConfig", "Shout"])
def test_only_functions_that_return_a_run_config_are_configs(package, name):
    said = f"--config {package}.{name}: there is no such config; .*the configs are loud$"
    with pytest.raises(ConfigError, match=said):
        parse(config=f"{package}.{name}")


PLAIN = """\
from configs.quickstart import quickstart
from torchtitan.config import ParallelismConfig
def own():
    return quickstart()
def empty():
    return None
def sharded():
    config = quickstart()
    config.trainer.parallelism = ParallelismConfig(tensor_parallel_degree=2)
    return config
"""


def test_a_function_that_is_named_needs_no_annotation(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    assert frozen(parse(config="plain.own")) == frozen(parse())
    given = parse("--trainer.parallelism.tensor_parallel_degree", "2")
    assert frozen(parse(config="plain.sharded")) == frozen(given)
    with pytest.raises(ConfigError, match="plain.empty: .* returned None; it must return a config"):
        parse(config="plain.empty")
    with pytest.raises(ConfigError, match=r"the module has no configs; .* def other\(\) ->"):
        parse(config="plain.other")
