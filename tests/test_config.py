"""Arguments of the command line, and messages about those that cannot work (C5)."""

import fnmatch
import math
import re

import pytest

from rl.cli import SHIPPED, common_fields, find_config, parse_config, shipped_configs
from rl.config import RLConfig
from rl.errors import ConfigError
from rl.frozen import frozen
from rl.help import GROUPS, shipped_sources
from rl.tasks.copy_digits import CopyDigits
from rl.validation import validate

PROGRAM = "python -m rl.train"


def parse(*overrides: str, config: str = "quickstart") -> RLConfig:
    return parse_config(["--config", config, *overrides], program=PROGRAM)[1]


# Values that are given have the type of their field.


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


# Names that do not exist.


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


def test_an_unknown_config_is_answered_with_the_nearest_and_all():
    with pytest.raises(
        ConfigError,
        match=r"--config quikstart: .*did you mean quickstart\? .*gsm8k_jsonl, quickstart",
    ):
        parse(config="quikstart")
    with pytest.raises(
        ConfigError, match=r"--config xyzzy: there is no such config; All that exist: dpo_jsonl, "
    ):
        parse(config="xyzzy")


@pytest.mark.parametrize("arguments", [[], ["--seed", "1"], ["--config"]])
def test_a_missing_config_is_answered_with_usage_and_all(arguments):
    with pytest.raises(
        ConfigError, match=r"--config NAME is missing; for example .*\nconfigs: .*quickstart"
    ):
        parse_config(arguments, program=PROGRAM)


# Configs and tasks of other packages.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A user's package with a task and a config of its own."""
    (tmp_path / "shouting").mkdir()
    (tmp_path / "shouting" / "__init__.py").write_text(
        "from dataclasses import dataclass\n"
        "from rl.config import RLConfig\n"
        "from rl.tasks.copy_digits import CopyDigits\n"
        "class Shout(CopyDigits):\n"
        "    @dataclass(kw_only=True, slots=True)\n"
        "    class Config(CopyDigits.Config):\n"
        "        loudness: float = 1.0\n"
        "def loud() -> RLConfig:\n"
        "    return RLConfig(task=Shout.Config(loudness=2.0))\n"
        "def helper():\n"
        "    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "shouting"


def test_a_config_of_another_package_is_found_by_module_and_name(package):
    config = parse("--task.loudness", "3", config=f"{package}.loud")
    assert config.task.loudness == 3.0
    assert frozen(config)["task"]["type"] == "shouting.Shout.Config"
    with pytest.raises(ConfigError, match="--task.loudnes: .*did you mean --task.loudness"):
        parse("--task.loudnes", "3", config=f"{package}.loud")


@pytest.mark.parametrize("name", ["loudd", "helper", "RLConfig", "Shout"])
def test_only_functions_that_return_a_run_config_are_configs(package, name):
    with pytest.raises(
        ConfigError,
        match=f"--config {package}.{name}: there is no such config; .*All that exist: loud$",
    ):
        parse(config=f"{package}.{name}")


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(
        ConfigError,
        match=r"--config no.such.config: cannot import no.such \(.*\); is its folder on PYTHONPATH",
    ):
        parse(config="no.such.config")


# Help, and values of the wrong type.


def printed(*arguments: str, capsys) -> str:
    """Return the help text that ``parse_config`` prints before it exits with 0."""
    with pytest.raises(SystemExit) as end:
        parse_config(arguments, program=PROGRAM)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_all_lists_every_field(capsys):
    text = printed("--config", "quickstart", "--help-all", capsys=capsys)
    for field in (
        "--seed",
        "--rollout.max-tokens",
        "--trainer.parallelism.tensor-parallel-degree",
        "--task.digits",
    ):
        assert field in text
    assert "Seed of the initial weights" in text


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_help_shows_the_common_fields_of_a_config(name, capsys):
    text = printed("--config", name, "--help", capsys=capsys)
    config = shipped_configs()[name]()
    assert f"  --steps {config.steps}  " in text
    sizes = f"  --trainer.micro_batch_size {config.trainer.micro_batch_size}  "
    assert sizes in text
    assert len(text.splitlines()) <= 62
    assert max(map(len, text.splitlines())) <= 100


def test_every_common_field_is_one_of_a_shipped_config(capsys):
    shown = {name for make in shipped_configs().values() for name in common_fields(make())}
    patterns = [pattern for words in GROUPS.values() for pattern in words]
    assert [each for each in patterns if not fnmatch.filter(shown, each)] == []


def test_help_shows_what_a_changed_shipped_config_returns(tmp_path, monkeypatch, capsys):
    before = printed("--config", "quickstart", "--help", capsys=capsys)
    source = (SHIPPED / "quickstart.py").read_text()
    (tmp_path / "quickstart.py").write_text(source.replace("steps=200", "steps=201"))
    for module in ("rl.cli", "rl.help"):
        monkeypatch.setattr(f"{module}.SHIPPED", tmp_path)
    shipped_configs.cache_clear()
    shipped_sources.cache_clear()
    after = printed("--config", "quickstart", "--help", capsys=capsys)
    assert after.replace("--steps 201", "--steps 200") == before != after
    monkeypatch.undo()
    shipped_configs.cache_clear()
    shipped_sources.cache_clear()


def test_help_shows_the_common_fields_of_a_users_config(package, capsys):
    text = printed("--config", f"{package}.loud", "--help", capsys=capsys)
    assert text.startswith(f"usage: {PROGRAM} --config {package}.loud ")
    assert "  --task.loudness 2\n" in text


def test_help_without_a_config_lists_the_configs(capsys):
    text = printed("--help", capsys=capsys)
    assert [*shipped_sources()] == [*re.findall(r"^  (\w+)  +[A-Z]", text, re.MULTILINE)]
    assert {*shipped_sources()} == {*shipped_configs()}


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (["--seed", "two"], "--seed"),
        (["--rollout.max-tokens", "1.5"], "--rollout.max-tokens"),
        (["--model.attention", "flash"], "--model.attention"),
        (["--trainer.micro_batch_size"], "--trainer.micro-batch-size"),
        (["--trainer.checkpoint.keep_latest_k", "1"], "trainer.checkpoint"),
    ],
)
def test_a_value_of_the_wrong_type_ends_with_2_and_names_the_field(capsys, written, named):
    with pytest.raises(SystemExit) as end:
        parse(*written)
    assert end.value.code == 2
    assert named in capsys.readouterr().err


# Values that cannot work.


REFUSED = [
    ("steps", 0, "steps is 0; it must be at least 1"),
    ("rollout.prompts_per_step", 0, "rollout.prompts_per_step is 0; it must be at least 1"),
    ("rollout.samples_per_prompt", 1, "rollout.samples_per_prompt is 1; it must be at least 2"),
    ("rollout.max_tokens", 0, "rollout.max_tokens is 0; it must be at least 1"),
    ("rollout.recorded_per_step", -1, "rollout.recorded_per_step is -1; it must be at least 0"),
    ("rollout.temperature", 0.0, "rollout.temperature is 0.0; it must be at least 0.01"),
    ("rollout.top_p", 0.9, "rollout.top_p is 0.9; it must be 1.0: .*log-probs"),
    ("rollout.top_k", 5, "rollout.top_k is 5; it must be 0: .*log-probs"),
    (
        "trainer.checkpoint.load_step",
        4,
        "trainer.checkpoint.load_step is 4; it must be -1: .*the newest",
    ),
    (
        "trainer.checkpoint.async_mode",
        "async_with_pinned_mem",
        (
            "trainer.checkpoint.async_mode is 'async_with_pinned_mem', which needs CUDA; "
            ".*'disabled' and 'async' are"
        ),
    ),
    ("trainer.micro_batch_size", 0, "trainer.micro_batch_size is 0; it must be at least 1"),
    (
        "trainer.micro_batch_tokens",
        21,
        "trainer.micro_batch_tokens is 21; it must be at least 22, the longest",
    ),
    ("trainer.logits_mib", 0, "trainer.logits_mib is 0; it must be at least 1"),
    ("trainer.max_skipped_steps", -1, "trainer.max_skipped_steps is -1; it must be at least 0"),
    ("rollout.max_staleness", -1, "rollout.max_staleness is -1; it must be at least 0"),
    (
        "rollout.stream_chunks",
        2,
        "rollout.stream_chunks is 2; it must be 1 unless rollout.pipeline is 'asynch",
    ),
    ("rollout.max_lost", 1.5, "rollout.max_lost is 1.5; it must be at most 1"),
    ("generator.replicas", 0, "generator.replicas is 0; it must be at least 1"),
    ("max_restarts", -1, "max_restarts is -1; it must be at least 0"),
    ("weights.canary_tolerance", -0.1, "weights.canary_tolerance is -0.1; it must be at least 0"),
    (
        "weights.transport",
        "cuda_ipc",
        (
            "weights.transport is 'cuda_ipc', which needs CUDA; .*'auto', 'shared_memory', 'rdma' "
            "and 'torchstore'"
        ),
    ),
    ("algorithm.loss.kl_coef", -0.1, "algorithm.loss.kl_coef is -0.1; it must be at least 0"),
    ("algorithm.reward_kl_coef", -0.1, "algorithm.reward_kl_coef is -0.1; it must be at least 0"),
    (
        "algorithm.adaptive_kl.target",
        0.1,
        "algorithm.adaptive_kl.target is 0.1; it must be 0 unless algorithm",
    ),
    ("algorithm.update_epochs", 0, "algorithm.update_epochs is 0; it must be at least 1"),
    (
        "algorithm.prompts_per_minibatch",
        7,
        "algorithm.prompts_per_minibatch is 7; it must divide rollout.prompts_per_step=",
    ),
    (
        "algorithm.overlong_buffer",
        1000,
        "algorithm.overlong_buffer is 1000; it must be at most rollout.max_tokens=",
    ),
    ("reference.refresh_every", -1, "reference.refresh_every is -1; it must be at least 0"),
    ("watchdog.stalled_s", 0.0, "watchdog.stalled_s is 0.0; it must be above 0"),
    ("watchdog.zero_std_steps", 0, "watchdog.zero_std_steps is 0; it must be at least 1"),
    ("watchdog.starving_steps", 0, "watchdog.starving_steps is 0; it must be at least 1"),
    ("watchdog.starving_share", 1.0, "watchdog.starving_share is 1.0; it must be below 1"),
    ("watchdog.entropy_min", -1.0, "watchdog.entropy_min is -1.0; it must be at least 0"),
    ("watchdog.entropy_max", math.nan, "watchdog.entropy_max is nan; it must be at least 0"),
    ("watchdog.drift_max", -0.1, "watchdog.drift_max is -0.1; it must be at least 0"),
    ("evaluation.prompts", -1, "evaluation.prompts is -1; it must be at least 0"),
    ("evaluation.samples", -1, "evaluation.samples is -1; it must be at least 0"),
    (
        "task.max_prompt_tokens",
        27,
        "task.max_prompt_tokens=27 .*rollout.max_tokens=6 is 33; .*at most model.max_seq_len=32",
    ),
    ("model.n_layers", 0, "model.n_layers is 0; it must be at least 1"),
    ("model.num_experts", -1, "model.num_experts is -1; it must be at least 0"),
    ("model.n_kv_heads", 3, "model.n_kv_heads is 3; it must divide model.n_heads=2"),
    ("model.head_dim", 48, r"model.head_dim is 48; .*allows \[32, 64"),
    ("model.hf_path", "/nowhere", "model.hf_path: there is no folder '/nowhere'; name one"),
    (
        "model.attention",
        "varlen",
        "model.attention is 'varlen', which needs CUDA; .*'auto' and 'dense' are allowed",
    ),
    (
        "generator.tensor_parallel_degree",
        3,
        r"generator.tensor_parallel_degree is 3; .*n_heads=2.*allowed are \[1, 2\]",
    ),
    *[
        (
            f"trainer.parallelism.{name}_degree",
            value,
            f"trainer.parallelism.{name}_degree is {value}; {allowed}",
        )
        for name, value, allowed in [
            ("tensor_parallel", 4, r"it must divide .*n_kv_heads=2.*allowed are \[1, 2\]"),
            ("tensor_parallel", 0, "it must be at least 1"),
            ("data_parallel_shard", -1, "it must be at least 1"),
            ("data_parallel_replicate", 0, "it must be at least 1"),
            ("context_parallel", 0, "it must be at least 1"),
            ("pipeline_parallel", 2, "it must be 1: cut the model by .*tensor_parallel_degree"),
            ("expert_parallel", 2, "it must be 1 where model.num_experts is 0"),
        ]
    ],
    (
        "slurm.time",
        "1h",
        (
            "slurm.time is '1h'; it must be empty, or minutes, minutes:seconds, "
            "hours:minutes:seconds or"
        ),
    ),
    (
        "slurm.time",
        "5",
        "slurm.warn_s is 300; it must be less than slurm.time='5', which is 300 s, or each attempt",
    ),
    (
        "trainer.parallelism.spmd_backend",
        "full_dtensor",
        "spmd_backend is 'full_dtensor'; .*only 'partial_dtensor'",
    ),
]


@pytest.mark.parametrize(("field", "value", "message"), REFUSED)
def test_a_value_that_cannot_work_is_refused_with_field_value_and_what_is_allowed(
    field, value, message
):
    with pytest.raises(ConfigError, match=message):
        parse(f"--{field}", str(value))


def test_a_gpu_host_must_have_as_many_as_the_config_needs():
    config = find_config("quickstart")()
    config.trainer.parallelism.data_parallel_shard_degree = 4
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = 2
    with pytest.raises(
        ConfigError, match="trainer.parallelism's degrees put 4 ranks on a node, which has 2 GPUs"
    ):
        validate(config)
    config.trainer.parallelism.data_parallel_shard_degree = 2
    validate(config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "context_parallel_load_balancer",
            "ptrr",
            "load_balancer is 'ptrr', .*'headtail' and None are allowed",
        ),
        (
            "attention",
            "varlen",
            "'varlen', which cannot run under .*context_parallel_degree=2; 'auto' and 'flex' can",
        ),
    ],
)
def test_settings_that_context_parallelism_cannot_run_are_refused(field, value, message):
    config = find_config("quickstart")()
    config.trainer.parallelism.context_parallel_degree = 2
    validate(config)
    setattr(config.model if field == "attention" else config.trainer.parallelism, field, value)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_a_generator_that_divides_experts_has_some_and_is_eager():
    config = find_config("quickstart")()
    config.generator.expert_parallel = True
    with pytest.raises(
        ConfigError, match="generator.expert_parallel is True; it must be False if model.num_exp"
    ):
        validate(config)
    config.model.num_experts = 4
    config.model.experts_per_token = 2
    config.model.moe_hidden_dim = 64
    validate(config)
    config.generator.enforce_eager = False
    with pytest.raises(
        ConfigError,
        match="generator.enforce_eager is False; it must be True with .*expert_parallel",
    ):
        validate(config)


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc"])
def test_only_changes_are_sent_where_that_can_be_less(transport):
    config = find_config("quickstart")()
    config.weights.delta = True
    for allowed in ("auto", "rdma", "torchstore"):
        config.weights.transport = allowed
        validate(config)
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = 2
    config.weights.transport = transport
    with pytest.raises(
        ConfigError,
        match=f"weights.delta is True; with weights.transport='{transport}' it must be Fa",
    ):
        validate(config)


def test_a_canary_may_be_strict_or_left_out_but_its_tolerance_is_a_number():
    assert parse("--weights.canary_tolerance", "0").weights.canary_tolerance == 0
    assert parse("--weights.canary_tolerance", "1e-6").weights.canary_tolerance == 1e-6
    assert parse().weights.digests and not parse("--weights.no-digests").weights.digests
    with pytest.raises(ConfigError, match="weights.canary_tolerance is nan; it must be at least 0"):
        parse("--weights.canary_tolerance", "nan")


def test_watchdog_actions_and_entropy_range_are_checked():
    config = find_config("quickstart")()
    config.watchdog.entropy_min = 0.5
    config.watchdog.entropy_max = 0.4
    with pytest.raises(
        ConfigError, match="watchdog.entropy_max is 0.4; it must be 0 or above entropy_min=0.5"
    ):
        validate(config)
    config.watchdog.entropy_max = 0.0
    config.watchdog.drift = "warning"
    with pytest.raises(
        ConfigError, match="watchdog.drift is 'warning'; it must be 'ignore' or 'warn' or 'fail'"
    ):
        validate(config)


@pytest.mark.parametrize("temperature", [math.nan, -1.0])
def test_temperatures_that_are_none_are_refused(temperature):
    config = find_config("quickstart")()
    config.rollout.temperature = temperature
    with pytest.raises(ConfigError, match=f"rollout.temperature is {temperature}"):
        validate(config)


def test_shipped_configs_can_work():
    validate(find_config("quickstart")())
