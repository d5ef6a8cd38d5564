"""Validation refuses absurd values of every field, by name (C5)."""

import math
from typing import Any

import pytest
from torchtitan.config import Configurable

from rl.algorithms.corrections import MaskedIS, TruncatedIS
from rl.algorithms.kl import AdaptiveKL
from rl.algorithms.losses import CISPOLoss, ClippedLoss
from rl.cli.arguments import find_config
from rl.config import RLConfig
from rl.errors import ConfigError
from rl.session.hardware import HardwareConfig
from rl.types.rules import Bounds, Fixed, rule_of
from rl.validation import validate
from rl.validation.layouts import validate_generator_layout
from rl.validation.values import (
    _members,
    fields_of,
    validate_types,
    values,
)
from tests.kit.full_config import full_config, put, with_converters
from tests.kit.tables import long

ABSURD = (-1, 0, math.nan, 1e30)
MORE_ABSURD = (math.inf, -math.inf, -0.5, 999_999_999_999)
KWARGS = "optimizer.param_groups.0.optimizer_kwargs"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "generator.kv_cache_gib"),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "generator.dtype"),
    ],
)
def test_a_variable_that_would_replace_a_field_is_refused(config, name, field, monkeypatch):
    monkeypatch.setenv(name, "900")
    with pytest.raises(ConfigError, match=f"{name}=900, .* would replace {field}; unset {name}"):
        validate(config)
    monkeypatch.setenv(name, "")
    validate(config)


@pytest.fixture
def config(tmp_path) -> RLConfig:
    (tmp_path / ".metadata").touch()
    return full_config(tmp_path)


def numbers(config: RLConfig) -> dict[str, Any]:
    """Return every value of ``config`` that is or may be a number and that may change, by name."""
    return {
        value.name: value
        for value in values(config)
        if not {int, float}.isdisjoint(_members(value.hint)) or type(value.content) in (int, float)
        if rule_of(value.hint, Fixed) is None
    }


def check_absurd(config: Any, absurds: tuple[float, ...]) -> int:
    """Set each number of a valid config to absurd ones, and return how often. Raise AssertionError
    unless each is refused by name or allowed by the field's rule.
    """
    validate(config)
    cases = 0
    for name, value in numbers(config).items():
        assert value.bounds is not None, f"{name} has no rule"
        for absurd in absurds:
            cases += 1
            try:
                validate(put(config, name, absurd))
            except ConfigError as error:
                allowed = value.bounds.complaint(absurd) == "" and not isinstance(absurd, float)
                assert allowed or str(error).startswith(f"{name} is {absurd}; it must be"), error
            else:
                assert value.bounds.complaint(absurd) == "", f"{name} took {absurd}"
        put(config, name, value.content)
    return cases


@pytest.mark.parametrize("absurds", [ABSURD, long(MORE_ABSURD)])
def test_absurd_numbers_are_refused_by_name_unless_the_rule_allows_them(config, absurds):
    assert check_absurd(config, absurds) > 600


def test_every_number_of_a_full_config_has_a_rule(config):
    assert [
        name for name, value in numbers(with_converters(config)).items() if not value.bounds
    ] == []


def test_every_numeric_field_of_algorithms_and_tasks_has_a_rule():
    rooms = ("rl.algorithms.", "rl.environments.", "rl.tasks.")
    parts = [part for part in every_part(Configurable.Config) if part.__module__.startswith(rooms)]
    assert {ClippedLoss.Config, CISPOLoss.Config, MaskedIS.Config} <= {*parts}
    bare = [
        f"{part.__qualname__}.{name}"
        for part in parts
        for name, hint in fields_of(part)
        if not {int, float}.isdisjoint(_members(hint)) and rule_of(hint, Bounds) is None
    ]
    assert bare == []


def every_part(kind: type) -> set[type]:
    return {kind}.union(*(every_part(part) for part in kind.__subclasses__()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("steps", 2.0, "steps is 2.0; it must be a whole number"),
        ("steps", "10", "steps is '10'; it must be a whole number"),
        ("steps", True, "steps is True; it must be a whole number"),
        ("resume", "no", "resume is 'no'; it must be True or False"),
        ("colocate", "model", "colocate is 'model'; it must be 'none' or 'models' or 'all'"),
        ("rollout", None, "rollout is None; it must be a RolloutConfig"),
        ("rollout", {"max_tokens": 3}, "it must be a RolloutConfig"),
        ("trainer.lora", "on", "trainer.lora is 'on'; it must be a LoRAConverter.Config or None"),
        ("trainer.micro_batch_tokens", "many", "it must be a whole number or None"),
        ("slurm.extra", "--hold", "slurm.extra is '--hold'; it must be a list"),
        ("slurm.extra", [3], "slurm.extra.0 is 3; it must be text"),
        ("slurm.environment", {"A": 1}, "slurm.environment.A is 1; it must be text"),
        ("algorithm.loss", AdaptiveKL.Config(), "it must be a PolicyLoss.Config"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(config, name, content, message):
    with pytest.raises(ConfigError) as error:
        validate_types(put(config, name, content))
    assert str(error.value).startswith(name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("algorithm.loss.clip_low", -2, "algorithm.loss.clip_low is -2; it must be at least 0"),
        ("algorithm.loss.clip_high", -2, "algorithm.loss.clip_high is -2; it must be at least 0"),
        ("algorithm.loss.dual_clip", 0.5, "loss.dual_clip is 0.5; it must be 0, or above 1"),
        ("algorithm.corrections", (TruncatedIS.Config(cap=0),), "cap is 0; it must be above 0"),
        ("algorithm.corrections", (MaskedIS.Config(low=3.0),), "0.low is 3.0; .* most high=2.0"),
        ("algorithm.adaptive_kl.target", -1, "adaptive_kl.target is -1; it must be at least 0"),
        ("algorithm.adaptive_kl.clip", 10.0, "adaptive_kl.rate=0.1 times .*clip=10.0 is 1.0"),
        ("trainer.lr_scheduler.decay_ratio", 5, "decay_ratio is 5; it must be at most 1"),
        ("trainer.checkpoint.keep_latest_k", 1, "keep_latest_k is 1; it must be 0, or at least 2"),
        (f"critic.{KWARGS}.eps", 0, f"critic.{KWARGS}.eps is 0; it must be at least 1e-30"),
        (f"trainer.{KWARGS}.betas", [0.9, 1.0], f"{KWARGS}.betas.1 is 1.0; it must be below 1"),
        ("rollout.prompts_per_step", 10**12, "prompts_per_step is 1000000000000; .* at most"),
        ("rollout.temperature", 2.1, "rollout.temperature is 2.1; it must be at most 2"),
        ("roles.judge.model.dim", 10**12, "roles.judge.model.dim is 1000000000000; it must be"),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(config, name, content, message):
    with pytest.raises(ConfigError, match=message):
        validate(put(config, name, content))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("seed", 999_999_999_999),
        ("trainer.checkpoint.keep_latest_k", 0),
        ("trainer.checkpoint.load_step", -1),
        ("trainer.training.global_batch_size", -1),
        ("algorithm.loss.clip_low", 2.0),
        ("algorithm.loss.entropy_coef", -0.5),
        ("rollout.temperature", 1),
        ("deadlines.heartbeat", 0),
    ],
)
def test_special_and_boundary_numbers_are_allowed(config, name, content):
    validate(put(config, name, content))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rollout.reward_workers", 999, "rollout.reward_workers is 999, which comes to 1002 proc"),
        ("generator.replicas", 999, "generator.replicas is 999, which comes to 1002 processes"),
        (
            "trainer.parallelism.data_parallel_shard_degree",
            1000,
            "the number of model ranks is 1002, which comes to 1002 processes on a node",
        ),
    ],
)
def test_more_processes_than_a_hosts_memory_holds_are_refused(config, name, content, message):
    config.hardware.host_memory_gib = 64.0
    validate(config)
    config.roles.clear()
    changed = put(config, name, content)
    with pytest.raises(ConfigError, match=message):
        validate(changed)
    changed.hardware.host_memory_gib = 1000.0
    validate(changed)


def test_a_generator_whose_gpu_does_not_hold_the_longest_answer_is_refused(config):
    config.hardware = HardwareConfig(device="h100", gpus_per_node=64, memory_gib=1.0)
    validate_generator_layout(config)
    config.model.max_seq_len = 10**8
    said = r"generator.gpu_memory_utilization is 0.5, which leaves 0.\d+ GiB of each GPU "
    with pytest.raises(ConfigError, match=said):
        validate_generator_layout(config)


def test_more_adapters_than_a_gpu_holds_beside_the_weights_are_refused():
    config = find_config("serve_tiny")()
    config.hardware = HardwareConfig(device="h100", gpus_per_node=8, memory_gib=1.0)
    validate(config)
    config.max_loras = 1024
    config.hardware.memory_gib = 0.25
    with pytest.raises(ConfigError, match=r"^max_loras is 1024; it must be at most \d\d\d, for "):
        validate(config)
    config.trainer.lora.rank = 2
    validate(config)


OUTSIDE = ("../../x", "/tmp/x", "a/b", ".", "config.json")
RESERVED = ("critic", "reference", "logs", "export", "judge")


@pytest.mark.parametrize("folder", OUTSIDE + RESERVED)
def test_a_checkpoint_folder_outside_the_run_or_with_a_reserved_name_is_refused(config, folder):
    said = "trainer.checkpoint.folder is '.*'; it must be a name of letters"
    with pytest.raises(ConfigError, match=said):
        validate(put(config, "trainer.checkpoint.folder", folder))


def test_a_run_that_would_never_save_is_refused(config):
    validate(put(config, "trainer.checkpoint.folder", "my_checkpoints-2"))
    with pytest.raises(ConfigError, match="trainer.checkpoint.load_only is True; it must be False"):
        validate(put(config, "trainer.checkpoint.load_only", True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("n_kv_heads", 3), "n_kv_heads is 3; it must be a divisor of roles.judge.model.n_heads"),
        (("attention", "varlen"), "attention is 'varlen'; it must be 'auto' or 'dense' on CPU"),
        (("num_experts", 4), "experts_per_token is 0; it must be between 1"),
    ],
)
def test_errors_of_a_roles_model_name_that_role(config, change, said):
    field, content = change
    with pytest.raises(ConfigError, match=f"^roles.judge.model.{said}"):
        validate(put(config, f"roles.judge.model.{field}", content))
