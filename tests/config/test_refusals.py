"""Values that cannot work are refused by field, value and what is allowed (C5)."""

import math
from typing import Any

import pytest

from rl.algorithms.advantages import GAE, GroupAdvantage, LeaveOneOut, ReinforcePlusPlus
from rl.cli import find_config
from rl.errors import ConfigError
from rl.validation import validate
from rl.weights.transport import NETWORKS
from tests.config.command_line import parse
from tests.tables import check_rows
from tests.validation.test_values import put

REFUSED = [
    ("steps", 0, "steps is 0; it must be at least 1"),
    ("rollout.prompts_per_step", 0, "rollout.prompts_per_step is 0; it must be at least 1"),
    ("rollout.samples_per_prompt", 1, "rollout.samples_per_prompt is 1; it must be at least 2"),
    ("rollout.max_tokens", 0, "rollout.max_tokens is 0; it must be at least 1"),
    ("record.sample", 0, "record.sample is 0; it must be at least 1"),
    ("record.max_gib", 0.0, "record.max_gib is 0.0; it must be above 0"),
    ("rollout.temperature", 0.0, "rollout.temperature is 0.0; it must be at least 0.01"),
    ("rollout.top_p", 0.0, "rollout.top_p is 0.0; it must be above 0"),
    ("rollout.top_p", 1.5, "rollout.top_p is 1.5; it must be at most 1"),
    ("rollout.top_k", -1, "rollout.top_k is -1; it must be at least 0"),
    ("rollout.min_p", 1.5, "rollout.min_p is 1.5; it must be at most 1"),
    (
        "trainer.checkpoint.load_step",
        4,
        "trainer.checkpoint.load_step is 4; it must be -1: .*set resume instead",
    ),
    (
        "trainer.checkpoint.async_mode",
        "async_with_pinned_mem",
        (
            "trainer.checkpoint.async_mode is 'async_with_pinned_mem'; it must be 'disabled' or "
            "'async' on CPU"
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
        "weights.transport is 'cuda_ipc'; it must be 'auto', 'shared_memory', 'tcp', .* on CPU",
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
    ("watchdog.vanished_steps", 0, "watchdog.vanished_steps is 0; it must be at least 1"),
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
    ("model.n_kv_heads", 3, "model.n_kv_heads is 3; it must be a divisor of model.n_heads=2"),
    ("model.head_dim", 48, r"model.head_dim is 48; it must be one of \[32, 64"),
    ("model.hf_path", "/nowhere", "model.hf_path: there is no folder '/nowhere'; name one"),
    (
        "model.attention",
        "varlen",
        "model.attention is 'varlen'; it must be 'auto' or 'dense' on CPU",
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
            ("data_parallel_shard", 0, "it must be -1, or at least 1"),
            ("data_parallel_replicate", 0, "it must be at least 1"),
            ("context_parallel", 0, "it must be at least 1"),
            ("pipeline_parallel", 2, "it must be 1: .*tensor_parallel_degree instead"),
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
        "slurm.warn_s is 300; it must be less than slurm.time='5', which is 300 s: each attempt",
    ),
    (
        "trainer.parallelism.spmd_backend",
        "full_dtensor",
        "spmd_backend is 'full_dtensor'; it must be 'partial_dtensor' with",
    ),
]


def test_a_value_that_cannot_work_is_refused_with_field_value_and_what_is_allowed():
    def check(row: tuple[str, Any, str]) -> None:
        field, value, message = row
        with pytest.raises(ConfigError, match=message):
            validate(put(find_config("quickstart")(), field, value))

    check_rows(REFUSED, check)


def test_a_value_of_the_command_line_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="^rollout.temperature is 0.0; it must be at least 0.01"):
        parse("--rollout.temperature", "0")


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
    message = "the meshes need 3 GPUs on a node, which has 2; set generator.nodes to 1, or colocat"
    with pytest.raises(ConfigError, match=message):
        validate(config)
    config.generator.nodes = 1
    validate(config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "context_parallel_load_balancer",
            "ptrr",
            "load_balancer is 'ptrr'; it must be 'headtail' on CPU",
        ),
        (
            "attention",
            "varlen",
            "'varlen'; it must be 'auto' or 'flex' with .*context_parallel_degree=2",
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


def test_shared_prompts_need_packed_rows_and_attention_with_branches():
    config = find_config("quickstart")()
    config.trainer.prompt_sharing = 4
    validate(config)
    config.trainer.packing = False
    with pytest.raises(
        ConfigError, match="trainer.prompt_sharing is 4; it must be 1 with packing=F"
    ):
        validate(config)
    config.trainer.packing = True
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = 8
    config.model.attention = "varlen"
    with pytest.raises(ConfigError, match="'varlen'; .* 'flex' with trainer.prompt_sharing=4"):
        validate(config)


def test_attention_that_rounds_to_bfloat16_is_refused_in_float32():
    config = find_config("quickstart")()
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = 8
    config.model.attention = "varlen"
    config.trainer.training.mixed_precision_param = "bfloat16"
    validate(config)
    config.trainer.training.mixed_precision_param = "float32"
    with pytest.raises(ConfigError, match="'varlen'; .* 'flex' with .*, since it rounds to bf"):
        validate(config)


def test_experts_are_compiled_only_if_they_are_divided():
    config = find_config("quickstart")()
    config.model.num_experts = 4
    config.model.experts_per_token = 2
    config.model.moe_hidden_dim = 64
    config.trainer.compile.enable = True
    with pytest.raises(
        ConfigError, match="trainer.compile.enable is True; it must be False unless trainer.parall"
    ):
        validate(config)
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config.trainer.parallelism.expert_parallel_degree = 2
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
def test_a_delta_push_is_planned_if_it_can_be_smaller(transport):
    config = find_config("quickstart")()
    config.weights.delta = True
    for allowed in ("auto", *NETWORKS):
        config.weights.transport = allowed
        validate(config)
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = 2
    config.weights.transport = transport
    with pytest.raises(
        ConfigError,
        match=f"weights.delta is True; it must be False with weights.transport='{transport}'",
    ):
        validate(config)


def test_readers_serve_each_other_only_with_a_transport_that_can():
    config = find_config("quickstart")()
    config.weights.fan_out = 2
    for allowed in ("auto", "tcp"):
        config.weights.transport = allowed
        validate(config)
    config.weights.transport = "rdma"
    with pytest.raises(
        ConfigError,
        match="weights.fan_out is 2; it must be 1 with weights.transport='rdma': only with 'tcp'",
    ):
        validate(config)


def test_a_canary_may_be_strict_or_left_out_but_its_tolerance_is_a_number():
    config = parse("--weights.canary_tolerance", "1e-6", "--weights.no-digests")
    assert (config.weights.canary_tolerance, config.weights.digests) == (1e-6, False)
    config = find_config("quickstart")()
    assert config.weights.digests
    config.weights.canary_tolerance = 0
    validate(config)
    config.weights.canary_tolerance = math.nan
    with pytest.raises(ConfigError, match="weights.canary_tolerance is nan; it must be at least 0"):
        validate(config)


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
def test_invalid_temperatures_are_refused(temperature):
    config = find_config("quickstart")()
    config.rollout.temperature = temperature
    with pytest.raises(ConfigError, match=f"rollout.temperature is {temperature}"):
        validate(config)


def test_shipped_configs_can_work():
    validate(find_config("quickstart")())


COMPARING = [
    GroupAdvantage.Config(),
    LeaveOneOut.Config(),
    ReinforcePlusPlus.Config(baseline="group_mean"),
]


@pytest.mark.parametrize("advantage", COMPARING, ids=lambda each: type(each).__qualname__)
def test_an_advantage_that_compares_a_group_is_refused_without_one(advantage):
    config = find_config("quickstart")()
    config.rollout.samples_per_prompt = 1
    config.algorithm.advantage = advantage
    with pytest.raises(
        ConfigError,
        match="rollout.samples_per_prompt is 1; it must be at least 2 with algorithm.advantage="
        f"{type(advantage).__qualname__}, which compares the completions",
    ):
        validate(config)
    config.rollout.samples_per_prompt = 2
    validate(config)


@pytest.mark.parametrize("advantage", [GAE.Config(), ReinforcePlusPlus.Config()])
def test_an_advantage_that_compares_no_group_takes_one_completion_of_each_prompt(advantage):
    config = find_config("quickstart")()
    config.rollout.samples_per_prompt = 1
    config.algorithm.advantage = advantage
    validate(config)
    config.rollout.max_resampled_groups = 3
    with pytest.raises(
        ConfigError, match="rollout.max_resampled_groups is 3; it must be 0 with rollout.samples"
    ):
        validate(config)
