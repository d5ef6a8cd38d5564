"""Refusal of fields that change nothing in a run, by the field to use instead."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torchtitan import config as titan
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from rl.algorithms.losses import (
    CISPOLoss,
    ClippedLoss,
    DistillationLoss,
    DPPOLoss,
    ImportanceSamplingLoss,
)
from rl.config import (
    CriticConfig,
    DatasetRunConfig,
    PreferenceConfig,
    ReferenceConfig,
    RewardModelConfig,
    RLConfig,
    RunConfig,
    SFTConfig,
    WatchdogConfig,
)
from rl.config.preference import InitialPolicyConfig
from rl.errors import ConfigError, require, require_value, shown
from rl.frozen import frozen
from rl.session.config import DeadlineConfig
from rl.validation.values import defaults_of, values

_STAGES = "pipeline parallelism is refused; use data_parallel_shard_degree"
_ONCE = "set initial_load_path and initial_load_model_only to start from other weights"
_LOG = "metrics.jsonl and trace.json of the run folder record the run"
_NO_ROLLOUTS = "the run has no rollouts"

UNUSED: dict[type, dict[str, str]] = {
    titan.TrainingConfig: {
        "local_batch_size": "set trainer.micro_batch_size instead",
        "global_batch_size": "set {batch} instead",
        "seq_len": "set {length} instead",
        "steps": "set steps instead",
        "disable_cuda_graphs": "the trainer captures no CUDA graphs",
        "gc_debug": "set gc_freq to 1 to collect garbage in every step",
    },
    titan.ParallelismConfig: {
        "module_fqns_per_model_part": _STAGES,
        "pipeline_parallel_first_stage_less_layers": _STAGES,
        "pipeline_parallel_last_stage_less_layers": _STAGES,
        "pipeline_parallel_layers_per_stage": _STAGES,
        "pipeline_parallel_schedule": _STAGES,
        "pipeline_parallel_schedule_csv": _STAGES,
        "pipeline_parallel_microbatch_size": _STAGES,
        "context_parallel_ptrr_mask_key": "the model has one attention mask, without a key",
    },
    CheckpointManager.Config: {
        "last_save_model_only": "every checkpoint is complete",
        "last_save_in_hf": "set export_every for exports on the way; the end of a run makes one",
        "export_dtype": "the export has the dtype of model.hf_path; cast the exported weights",
        "create_seed_checkpoint": "initial weights depend on seed alone, in every layout: set seed",
        "exclude_from_loading": f"a resumed run loads everything; {_ONCE}",
        "initial_load_in_hf_quantized": f"quantized weights are not read; {_ONCE}",
    },
    titan.CommConfig: {
        "train_timeout_seconds": "set deadlines.call, which ends a step whose collective hangs",
        "mode": "ranks communicate for real; python -m rl.plan checks a layout without them",
    },
    titan.DebugConfig: {
        "seed": "set seed instead",
        "spmd_typechecking": "it needs an spmd_backend that is refused; set detect_anomaly",
        "moe_force_load_balance": "experts are chosen by their router alone",
        "batch_invariant": "set deterministic instead",
        "print_config": "config.json in the run folder holds the config",
        "save_config_file": "config.json in the run folder holds the config; set output_dir",
        "enable_structured_logging": _LOG,
    },
    Float8LinearConverter.Config: {
        "model_compile_enabled": "it follows from trainer.compile; set trainer.compile.enable"
    },
}
"""Fields without an effect, by the dataclass that has them, and what to use instead."""

_BASE_AC = ("preserve_rng_state", "determinism_check", "debug")
UNUSED_BY_MEMORY_BUDGET = dict.fromkeys(
    _BASE_AC, "a memory budget recomputes in compiled code; set memory_budget"
)

UNUSED_WITHOUT_ROLLOUTS: dict[type, dict[str, str]] = {
    WatchdogConfig: dict.fromkeys(
        [
            "zero_std",
            "zero_std_steps",
            "starving",
            "starving_share",
            "starving_steps",
            "drift",
            "drift_max",
        ],
        f"{_NO_ROLLOUTS}; set watchdog.non_finite or watchdog.stalled",
    ),
}
"""Fields without an effect in runs that train on given examples."""

UNUSED_WITHOUT_GENERATORS: dict[type, dict[str, str]] = {
    DeadlineConfig: dict.fromkeys(
        ("push", "reward"), "the run has no generators; set deadlines.call"
    )
}
"""Fields without an effect in runs that sample no completions."""

UNUSED_WITHOUT_ENTROPY: dict[type, dict[str, str]] = {
    WatchdogConfig: dict.fromkeys(
        ("entropy", "entropy_min", "entropy_max"),
        "the loss has no entropy; set watchdog.non_finite or watchdog.stalled",
    )
}
"""Fields without an effect in runs that train on preferences."""

OPTIMIZER_OPTIONS = {
    "Adam": "lr betas eps weight_decay amsgrad maximize foreach fused capturable differentiable "
    "decoupled_weight_decay",
    "AdamW": "lr betas eps weight_decay amsgrad maximize foreach fused capturable differentiable",
}
"""Options of a parameter group by optimizer. torch keeps others in the group and ignores them."""


def validate_unused(config: RunConfig) -> None:
    """Raise ConfigError, naming field, value and what to use instead, if a field that changes
    nothing is not at its default.
    """
    words = _words(config)
    for name, section, unused in _sections(config):
        defaults = defaults_of(type(section))  # type: ignore[arg-type]
        for field, advice in unused.items():
            value = getattr(section, field)
            message = f"{name}.{field} is {shown(value)}; it must be {defaults[field]!r}: {advice}"
            require(value == defaults[field], message.format(**words))
    _validate_performance(config)
    _validate_optimizers(config)
    _validate_schedules(config)
    _validate_loss(config)
    if isinstance(config, RLConfig):
        _validate_models(config)


def _words(config: RunConfig) -> dict[str, str]:
    """Return the fields of this kind of run that the advice names."""
    if isinstance(config, RLConfig):
        return {
            "batch": "rollout.prompts_per_step",
            "length": "rollout.max_tokens and task.max_prompt_tokens",
        }
    return {"batch": "examples_per_step", "length": "task.max_tokens"}


def _sections(config: RunConfig) -> Iterator[tuple[str, Any, dict[str, str]]]:
    """Yield the name, content and unused fields of the sections that have some."""
    tables = [UNUSED]
    if isinstance(config, DatasetRunConfig):
        tables.append(UNUSED_WITHOUT_ROLLOUTS)
        if not isinstance(config, SFTConfig) or config.evaluation is None:
            tables.append(UNUSED_WITHOUT_GENERATORS)
    if isinstance(config, PreferenceConfig):
        tables.append(UNUSED_WITHOUT_ENTROPY)
    for value in values(config):
        for table in tables:
            if type(value.content) in table:
                yield value.name, value.content, table[type(value.content)]
        if isinstance(value.content, MemoryBudgetAC.Config):
            yield value.name, value.content, UNUSED_BY_MEMORY_BUDGET


def _validate_performance(config: RunConfig) -> None:
    components = config.trainer.compile.components
    require_value(
        components in (["model"], ["model", "loss"]),
        "trainer.compile.components",
        components,
        "['model'], or the default ['model', 'loss']: losses are not compiled; to compile nothing, "
        "set trainer.compile.enable to False",
    )
    float8 = config.trainer.float8
    if float8 is not None and float8.emulate:
        recipe = float8.recipe_name
        rule = "'rowwise' with trainer.float8.emulate=True, which computes by no recipe"
        require_value(recipe == "rowwise", "trainer.float8.recipe_name", recipe, rule)
    backend = config.trainer.compile.backend
    rule = "'inductor' or 'aot_eager', which torchtitan's attention can be compiled by"
    require_value(backend in ("inductor", "aot_eager"), "trainer.compile.backend", backend, rule)
    for name, parallelism in _of_type(config, titan.ParallelismConfig):
        require(
            not parallelism.enable_fsdp_symm_mem or config.hardware.kind == "cuda",
            f"{name}.enable_fsdp_symm_mem is True, which needs CUDA; on CPU it must be False",
        )
    overlaps = config.trainer.compile.enable_async_tensor_parallel
    require(
        not overlaps or config.hardware.kind == "cuda",
        "trainer.compile.enable_async_tensor_parallel is True, which needs CUDA; on CPU it must be "
        "False",
    )


def _validate_optimizers(config: RunConfig) -> None:
    for name, optimizer in _of_type(config, OptimizersContainer.Config):
        names = {group.optimizer_name for group in optimizer.param_groups}
        for key in optimizer.optimizer_factory_kwargs_by_name:
            require(
                key in names,
                f"{name}.optimizer_factory_kwargs_by_name has {key!r}; it must be the "
                f"optimizer_name of one of {name}.param_groups: {sorted(names)}",
            )
        for number, group in enumerate(optimizer.param_groups):
            options = OPTIMIZER_OPTIONS.get(group.optimizer_name, "").split()
            for key in group.optimizer_kwargs:
                require(
                    not options or key in options,
                    f"{name}.param_groups.{number}.optimizer_kwargs has {key!r}; "
                    f"{group.optimizer_name} takes {', '.join(options)}",
                )


def _validate_schedules(config: RunConfig) -> None:
    """Check that no schedule ends before the run: torchtitan's would go on below 0."""
    if isinstance(config, DatasetRunConfig) and config.epochs:
        return  # the number of steps follows from the examples
    steps = config.steps * config.updates_per_step
    for name, schedule in _of_type(config, LRSchedulersContainer.Config):
        total = schedule.total_steps
        rule = f"None or at least the run's {steps} optimizer steps"
        require_value(total is None or total >= steps, f"{name}.total_steps", total, rule)


def _validate_loss(config: RunConfig) -> None:
    """Check that the loss is one of what the run computes."""
    if isinstance(config, SFTConfig):
        needs_rollouts = (
            *(ClippedLoss.Config, CISPOLoss.Config, DPPOLoss.Config),
            *(ImportanceSamplingLoss.Config, DistillationLoss.Config),
        )
        require(
            not isinstance(config.loss, needs_rollouts),
            f"loss is {type(config.loss).__qualname__}, which needs advantages or a teacher; it "
            "must be a loss of log-probs and entropy, such as CrossEntropyLoss.Config",
        )
    if isinstance(config, RewardModelConfig):
        head = config.loss.build().head
        require(
            head == "values",
            f"loss is {type(config.loss).__qualname__}, a loss of log-probs; a reward model takes "
            "a loss of values, such as BradleyTerryLoss.Config: train a policy with a "
            "PreferenceConfig",
        )
    if isinstance(config, PreferenceConfig) and not config.loss.build().needs_reference:
        name = type(config.loss).__qualname__.split(".")[0]
        why = f"{name} compares with no reference; choose a loss that does"
        _require_default("reference", config.reference, InitialPolicyConfig(), why)


def _validate_models(config: RLConfig) -> None:
    """Check the sections of models that the algorithm may not have."""
    needed = config.algorithm.roles()
    why = "the algorithm has no reference; set algorithm.loss.kl_coef above 0"
    if "reference" not in needed:
        _require_default("reference", config.reference, ReferenceConfig(), why)
    why = "the algorithm has no critic; choose an algorithm.advantage with values"
    if "critic" not in needed:
        _require_default("critic", config.critic, CriticConfig(), why)


def _require_default(name: str, section: Any, default: Any, why: str) -> None:
    """Raise ConfigError, naming a field that differs, unless ``section`` is ``default``."""
    for own, usual in zip(values(section), values(default), strict=False):
        is_section = dataclasses.is_dataclass(own.content)
        is_longer = isinstance(own.content, list) and len(own.content) != len(usual.content)
        if is_section or (isinstance(own.content, list | dict) and not is_longer):
            continue
        if frozen(own.content) != frozen(usual.content):
            field = f"{name}.{own.name}"
            value = f"{shown(own.content)}; it must be {shown(usual.content)}"
            raise ConfigError(f"{field} is {value}: {why}")


def _of_type(config: RunConfig, kind: type) -> Iterator[tuple[str, Any]]:
    return ((value.name, value.content) for value in values(config) if type(value.content) is kind)
