"""Checks of a config, made before any process starts."""

import re
from pathlib import Path

from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from rl.cluster import HardwareConfig, SlurmConfig
from rl.config import RLConfig, RolloutConfig, WatchdogConfig
from rl.errors import ConfigError, require
from rl.model.shape import shape_of
from rl.training.config import TrainerConfig, adaptable_layers
from rl.validation.engines import validate_engines
from rl.validation.folders import validate_folders
from rl.validation.layouts import validate_layouts
from rl.validation.values import validate_numbers, validate_types

RESERVED = ("critic", "export", "launch", "lock", "logs", "reference", "replicas", "unevaluated")
"""Names in a run folder that have a use."""


def validate(config: RLConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if the run cannot work."""
    validate_types(config)
    validate_numbers(config)
    _validate_sampling(config.rollout)
    validate_folders(config)
    validate_layouts(config)
    _validate_checkpoint(config)
    _validate_training_modes(config.trainer, config.hardware)
    _validate_lengths(config)
    validate_engines(config)
    _validate_push(config)
    _validate_pipeline(config.rollout)
    _validate_algorithm(config)
    _validate_roles(config)
    _validate_lora(config)
    _validate_watchdog(config.watchdog)
    _validate_slurm(config.slurm)


def _validate_sampling(rollout: RolloutConfig) -> None:
    for name, value, allowed in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        require(
            value == allowed,
            f"rollout.{name} is {value}; it must be {allowed}: the trainer knows no log-probs of a "
            "cut distribution",
        )


def _validate_checkpoint(config: RLConfig) -> None:
    checkpoint = config.trainer.checkpoint
    folder = checkpoint.folder
    step = checkpoint.load_step
    mode = checkpoint.async_mode
    taken = (*RESERVED, *config.roles)
    require(
        bool(re.fullmatch(r"[\w-]+", folder)) and folder not in taken,
        f"trainer.checkpoint.folder is {folder!r}; it must be a name of letters, digits, _ and - "
        f"for a folder in the run folder, other than {', '.join(taken)}",
    )
    require(
        not checkpoint.load_only,
        "trainer.checkpoint.load_only is True; it must be False, or no step would ever be saved: "
        "to start from another run's checkpoint, set trainer.checkpoint.initial_load_path",
    )
    require(
        step == -1,
        f"trainer.checkpoint.load_step is {step}; it must be -1: --resume goes on from the newest, "
        "losing no work",
    )
    require(
        mode != "async_with_pinned_mem" or config.hardware.kind == "cuda",
        f"trainer.checkpoint.async_mode is {mode!r}, which needs CUDA; on CPU 'disabled' and "
        "'async' are allowed",
    )


def _validate_training_modes(trainer: TrainerConfig, hardware: HardwareConfig) -> None:
    if trainer.float8 is not None:
        emulate = trainer.float8.emulate
        require(
            emulate or hardware.computes_float8,
            "trainer.float8.emulate is False; it must be True where hardware.device is "
            f"{hardware.device!r}: only a GPU that computes in float8 (NVIDIA SM89 or AMD gfx942, "
            "or later) need not emulate it",
        )
        require(
            not (emulate and trainer.compiles_model),
            "trainer.float8.emulate is True; with trainer.compile.enable=True it must be False: "
            "emulated float8 cannot be compiled",
        )
    require(
        trainer.compiles_model
        or not isinstance(trainer.activation_checkpoint, MemoryBudgetAC.Config),
        "trainer.activation_checkpoint is memory-budget, which only a compiled model can keep: set "
        "trainer.compile.enable to True, or choose selective, full or none",
    )


def _validate_lora(config: RLConfig) -> None:
    lora = config.trainer.lora
    shape = shape_of(config.model)
    if lora is None:
        return
    allowed = adaptable_layers(config.model)
    require(
        lora.target_modules is None
        or (bool(lora.target_modules) and set(lora.target_modules) <= set(allowed)),
        f"trainer.lora.target_modules is {lora.target_modules}; it must be None, for all, or some "
        f"of {allowed} with model.fuse_qkv={config.model.fuse_qkv}",
    )
    require(
        shape.num_experts == 0,
        f"trainer.lora is on; it must be none with the model's {shape.num_experts} experts, which "
        "have no adapters",
    )
    require(
        config.trainer.float8 is None,
        "trainer.lora is on; it must be none with trainer.float8: the two are not supported "
        "together",
    )


def _validate_slurm(slurm: SlurmConfig) -> None:
    try:
        limit = slurm.time_s
    except ValueError:
        allowed = (
            "minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]]"
        )
        raise ConfigError(f"slurm.time is {slurm.time!r}; it must be empty, or {allowed}") from None
    require(
        limit is None or limit > slurm.warn_s,
        f"slurm.warn_s is {slurm.warn_s}; it must be less than slurm.time={slurm.time!r}, which is "
        f"{limit} s, or each attempt is told to leave as it begins",
    )


def _validate_lengths(config: RLConfig) -> None:
    """Check the lengths of prompts and completions, in tokens."""
    shape = shape_of(config.model)
    prompt = config.task.max_prompt_tokens
    completion = config.rollout.max_tokens
    longest = prompt + completion
    require(
        longest <= shape.max_seq_len,
        f"task.max_prompt_tokens={prompt} + rollout.max_tokens={completion} is {longest}; it must "
        f"be at most model.max_seq_len={shape.max_seq_len}",
    )
    budget = config.trainer.micro_batch_tokens
    require(
        budget is None or budget >= longest,
        f"trainer.micro_batch_tokens is {budget}; it must be at least {longest}, the longest "
        "prompt and completion",
    )


def _validate_push(config: RLConfig) -> None:
    push = config.weights
    require(
        push.transport != "cuda_ipc" or config.hardware.kind == "cuda",
        "weights.transport is 'cuda_ipc', which needs CUDA; on CPU 'auto', 'shared_memory', 'rdma' "
        "and 'torchstore' are allowed",
    )
    require(
        not push.delta or push.transport in ("auto", "rdma", "torchstore"),
        f"weights.delta is True; with weights.transport={push.transport!r} it must be False: a "
        "copy of everything is as quick there",
    )


def _validate_pipeline(rollout: RolloutConfig) -> None:
    parts = rollout.stream_chunks
    field_name = "rollout.stream_chunks"
    require(
        parts == 1 or rollout.pipeline == "asynchronous",
        f"{field_name} is {parts}; it must be 1 unless rollout.pipeline is 'asynchronous': the "
        "order in which groups finish would change the numbers",
    )
    require(
        parts <= rollout.prompts_per_step,
        f"{field_name} is {parts}; it must be at most "
        f"rollout.prompts_per_step={rollout.prompts_per_step}",
    )


def _validate_algorithm(config: RLConfig) -> None:
    algorithm = config.algorithm
    algorithm.check(config.rollout)
    whole = config.updates_per_step > 1 or not algorithm.by_group
    chunks = config.rollout.stream_chunks
    require(
        chunks == 1 or not whole,
        f"rollout.stream_chunks is {chunks}; it must be 1 where a step has several updates or its "
        "advantages are compared over all groups: the whole batch must be there",
    )
    alone = config.colocate != "all" or (
        config.rollout.max_staleness == 0 and config.generator.enforce_eager
    )
    require(
        alone,
        "colocate is 'all'; it must be 'none' or 'models' unless rollout.max_staleness is 0 "
        "(nothing is generated while the trainer has the devices) and generator.enforce_eager is "
        "True (compiled code keeps addresses)",
    )


def _validate_roles(config: RLConfig) -> None:
    words = shape_of(config.model).vocab_size
    longest = config.task.max_prompt_tokens + config.rollout.max_tokens
    for name, role in config.roles.items():
        taken = (*RESERVED, "checkpoints", "generator", "policy", "reward", "trainer")
        require(
            name.isidentifier() and name not in taken,
            f"roles: {name!r} cannot be the name of a role; it must be an identifier other than "
            f"{list(taken)}",
        )
        shape = shape_of(role.model)
        require(
            shape.vocab_size == words,
            f"roles.{name}.model.vocab_size is {shape.vocab_size}; it must be that of the policy, "
            f"{words}",
        )
        require(
            shape.max_seq_len >= longest,
            f"roles.{name}.model.max_seq_len is {shape.max_seq_len}; it must be at least "
            f"{longest}, the longest prompt and completion",
        )
        require(
            bool(role.checkpoint or (role.model.hf_path and role.head == "logprobs")),
            f"roles.{name}.checkpoint is not set; it must say where the weights are, or "
            f"model.hf_path where roles.{name}.head is 'logprobs'",
        )
        require(
            role.checkpoint is None or Path(role.checkpoint, ".metadata").is_file(),
            f"roles.{name}.checkpoint is {role.checkpoint!r}, where no complete checkpoint is; "
            "name the folder of one, as RUN/checkpoints/step-100",
        )
        require(
            role.reward_weight == 0 or role.head == "values",
            f"roles.{name}.reward_weight is {role.reward_weight}; it must be 0 unless "
            f"roles.{name}.head is 'values'",
        )


def _validate_watchdog(watchdog: WatchdogConfig) -> None:
    low = watchdog.entropy_min
    high = watchdog.entropy_max
    require(
        high == 0 or high > low,
        f"watchdog.entropy_max is {high}; it must be 0 or above entropy_min={low}",
    )
