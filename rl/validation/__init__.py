"""Checks of a config, made before any process starts."""

import re
from collections.abc import Callable
from typing import Any

from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from rl.algorithms.sequence_losses import KTOLoss
from rl.config import PreferenceConfig, RLConfig, RunConfig, SFTConfig
from rl.errors import ConfigError, require, require_value
from rl.model.shape import shape_of
from rl.tasks.environment import EnvironmentTask
from rl.training.config import adaptable_layers
from rl.validation.engines import validate_engines
from rl.validation.episodes import validate_episodes
from rl.validation.folders import validate_folders
from rl.validation.layouts import validate_layouts
from rl.validation.unused import validate_unused
from rl.validation.values import validate_numbers, validate_types

RESERVED = (
    *("critic", "export", "exports", "launch", "lock", "logs", "reference", "replicas"),
    *("rollouts", "tensorboard", "tokenizer", "unevaluated", "wandb"),
)
"""Names in a run folder that Tiller uses."""


def validate(config: RunConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if the run cannot work."""
    for check in checks(config):
        check(config)


def checks(config: RunConfig) -> list[Callable[[Any], None]]:
    """Return the parts of ``validate``, in order. All but the first two rely on those two."""
    found: list[Callable[[Any], None]] = [validate_types, validate_numbers, validate_unused]
    if isinstance(config, RLConfig):
        found += [_validate_sampling]
    found += [validate_folders, validate_layouts, _validate_checkpoint]
    found += [_validate_training_modes, validate_engines]
    if isinstance(config, RLConfig):
        found += [_validate_lengths, _validate_push, _validate_chunks]
        found += [_validate_algorithm, _validate_roles]
    elif isinstance(config, SFTConfig | PreferenceConfig):
        found += [_validate_dataset, _validate_sampled_evaluation]
    return [*found, _validate_lora, _validate_watchdog, _validate_slurm, _validate_sinks]


def _validate_sinks(config: RunConfig) -> None:
    for sink in config.sinks.all():
        sink.check()


def _validate_dataset(config: SFTConfig | PreferenceConfig) -> None:
    room = shape_of(config.model).max_seq_len
    longest = config.task.max_tokens
    rule = f"at most model.max_seq_len={room}"
    require_value(longest <= room, "task.max_tokens", longest, rule)
    count = config.examples_per_step
    rule = "at least 2 with KTOLoss, whose baseline compares answers of a step"
    require_value(
        count > 1 or not isinstance(config.loss, KTOLoss.Config), "examples_per_step", count, rule
    )
    budget = config.trainer.micro_batch_tokens
    rule = f"at least task.max_tokens={longest}"
    require_value(budget is None or budget >= longest, "trainer.micro_batch_tokens", budget, rule)
    if isinstance(config, SFTConfig):
        penalty = config.loss.kl_coef
        require_value(penalty == 0, "loss.kl_coef", penalty, "0: the run has no reference policy")
    require(
        config.model.hf_path is not None,
        "model.hf_path is not set; it must be the folder of the model and its tokenizer",
    )


def _validate_sampled_evaluation(config: SFTConfig | PreferenceConfig) -> None:
    sampling = config.sampling_run() if isinstance(config, SFTConfig) else None
    if sampling is None:
        return
    prompts = sampling.evaluation.prompts
    require_value(prompts > 0, "evaluation.prompts", prompts, "above 0; or set evaluation to None")
    colocate = sampling.colocate
    rule = "'none' or 'all': the trainer is the only model"
    require_value(colocate != "models", "evaluation.colocate", colocate, rule)
    try:
        validate(sampling)
    except ConfigError as error:
        raise ConfigError(f"evaluation: {error}") from None


def _validate_sampling(config: RLConfig) -> None:
    resampled = config.rollout.max_resampled_groups
    samples = config.rollout.samples_per_prompt
    rule = "0 with rollout.samples_per_prompt=1: the rewards of every group are equal"
    require_value(samples > 1 or resampled == 0, "rollout.max_resampled_groups", resampled, rule)


def _validate_checkpoint(config: RunConfig) -> None:
    checkpoint = config.trainer.checkpoint
    field = "trainer.checkpoint"
    folder = checkpoint.folder
    taken = (*RESERVED, *(config.roles if isinstance(config, RLConfig) else ()))
    require_value(
        bool(re.fullmatch(r"[\w-]+", folder)) and folder not in taken,
        f"{field}.folder",
        folder,
        f"a name of letters, digits, _ and -, and none of {', '.join(taken)}",
    )
    require(
        not checkpoint.load_only,
        f"{field}.load_only is True; it must be False, or no step would be saved: to start from "
        f"another run's checkpoint, set {field}.initial_load_path",
    )
    step = checkpoint.load_step
    rule = "-1: --resume goes on from the newest checkpoint"
    require_value(step == -1, f"{field}.load_step", step, rule)
    require(
        checkpoint.async_mode != "async_with_pinned_mem" or config.hardware.kind == "cuda",
        f"{field}.async_mode is 'async_with_pinned_mem', which needs CUDA; on CPU 'disabled' and "
        "'async' are allowed",
    )


def _validate_training_modes(config: RunConfig) -> None:
    trainer = config.trainer
    hardware = config.hardware
    if trainer.float8 is not None:
        emulate = trainer.float8.emulate
        require(
            emulate or hardware.computes_float8,
            "trainer.float8.emulate is False; it must be True where hardware.device is "
            f"{hardware.device!r}: float8 needs NVIDIA SM89, AMD gfx942, or a later GPU",
        )
        require(
            not (emulate and trainer.compiles_model),
            "trainer.float8.emulate is True; with trainer.compile.enable=True it must be False",
        )
    budget = isinstance(trainer.activation_checkpoint, MemoryBudgetAC.Config)
    require(
        trainer.compiles_model or not budget,
        "trainer.activation_checkpoint is memory-budget, which needs a compiled model: set "
        "trainer.compile.enable to True, or choose selective, full or none",
    )


def _validate_lora(config: RunConfig) -> None:
    lora = config.trainer.lora
    if lora is None:
        return
    allowed = adaptable_layers(config.model)
    chosen = lora.target_modules
    require_value(
        chosen is None or (bool(chosen) and set(chosen) <= set(allowed)),
        "trainer.lora.target_modules",
        chosen,
        f"None, for all, or some of {allowed} with model.fuse_qkv={config.model.fuse_qkv}",
    )
    experts = shape_of(config.model).num_experts
    scores = isinstance(config, PreferenceConfig) and config.loss.build().head == "values"
    for other, clashes in (
        ("a reward model, whose value head would be frozen", scores),
        (f"the model's {experts} experts", experts > 0),
        ("trainer.float8", config.trainer.float8 is not None),
    ):
        require(not clashes, f"trainer.lora is on; it must be none with {other}")


def _validate_watchdog(config: RunConfig) -> None:
    low = config.watchdog.entropy_min
    high = config.watchdog.entropy_max
    require_value(
        high == 0 or high > low, "watchdog.entropy_max", high, f"0 or above entropy_min={low}"
    )


def _validate_slurm(config: RunConfig) -> None:
    slurm = config.slurm
    try:
        limit = slurm.time_s
    except ValueError:
        allowed = (
            "minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]]"
        )
        raise ConfigError(f"slurm.time is {slurm.time!r}; it must be empty, or {allowed}") from None
    require_value(
        limit is None or limit > slurm.warn_s,
        "slurm.warn_s",
        slurm.warn_s,
        f"less than slurm.time={slurm.time!r}, which is {limit} s, or each attempt leaves at once",
    )


def _validate_lengths(config: RLConfig) -> None:
    """Check the lengths of prompts and completions, in tokens."""
    completion = config.rollout.max_tokens
    room = shape_of(config.model).max_seq_len
    longest = config.task.longest_sequence(completion)
    if isinstance(config.task, EnvironmentTask.Config):
        fields = "task.max_episode_tokens"
    else:
        prompt = config.task.max_prompt_tokens
        fields = f"task.max_prompt_tokens={prompt} + rollout.max_tokens={completion}"
    require_value(longest <= room, fields, longest, f"at most model.max_seq_len={room}")
    budget = config.trainer.micro_batch_tokens
    rule = f"at least {longest}, the longest prompt and completion"
    require_value(budget is None or budget >= longest, "trainer.micro_batch_tokens", budget, rule)


def _validate_push(config: RLConfig) -> None:
    transport = config.weights.transport
    require(
        transport != "cuda_ipc" or config.hardware.kind == "cuda",
        "weights.transport is 'cuda_ipc', which needs CUDA; on CPU 'auto', 'shared_memory', 'tcp', "
        "'rdma' and 'torchstore' are allowed",
    )
    require(
        not config.weights.delta or transport not in ("shared_memory", "cuda_ipc"),
        f"weights.delta is True; with weights.transport={transport!r} it must be False",
    )
    fan_out = config.weights.fan_out
    rule = f"1 with weights.transport={transport!r}: only with 'tcp' readers serve each other"
    require_value(fan_out == 1 or transport in ("auto", "tcp"), "weights.fan_out", fan_out, rule)


def _validate_chunks(config: RLConfig) -> None:
    field = "rollout.stream_chunks"
    chunks = config.rollout.stream_chunks
    prompts = config.rollout.prompts_per_step
    rule = f"at most rollout.prompts_per_step={prompts}"
    require_value(chunks <= prompts, field, chunks, rule)
    if chunks > 1:
        rule = (
            "1 unless rollout.pipeline is 'asynchronous': the order in which groups finish would "
            "change the numbers"
        )
        require_value(config.rollout.pipeline == "asynchronous", field, chunks, rule)
        rule = (
            "1 where a step has several updates or its advantages are compared over all groups: "
            "both need the whole batch"
        )
        whole = config.updates_per_step > 1 or not config.algorithm.by_group
        require_value(not whole, field, chunks, rule)


def _validate_algorithm(config: RLConfig) -> None:
    config.algorithm.check(config.rollout)
    validate_episodes(config)
    in_turns = config.rollout.max_staleness == 0 and config.generator.enforce_eager
    require(
        config.colocate != "all" or in_turns,
        "colocate is 'all'; it must be 'none' or 'models' unless rollout.max_staleness is 0 "
        "(nothing is generated while the trainer has the devices) and generator.enforce_eager is "
        "True (compiled code keeps addresses)",
    )


def _validate_roles(config: RLConfig) -> None:
    vocabulary = shape_of(config.model).vocab_size
    longest = config.task.longest_sequence(config.rollout.max_tokens)
    taken = (*RESERVED, "checkpoints", "generator", "policy", "reward", "trainer")
    for name, role in config.roles.items():
        field = f"roles.{name}"
        require(
            name.isidentifier() and name not in taken,
            f"roles: {name!r} cannot be the name of a role; it must be an identifier other than "
            f"{', '.join(taken)}",
        )
        shape = shape_of(role.model)
        size = shape.vocab_size
        rule = f"that of the policy, {vocabulary}"
        require_value(size == vocabulary, f"{field}.model.vocab_size", size, rule)
        room = shape.max_seq_len
        rule = f"at least {longest}, the longest prompt and completion"
        require_value(room >= longest, f"{field}.model.max_seq_len", room, rule)
        weight = role.reward_weight
        rule = f"0 unless {field}.head is 'values'"
        require_value(weight == 0 or role.head == "values", f"{field}.reward_weight", weight, rule)
