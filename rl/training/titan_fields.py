"""Rules of the fields of torchtitan's dataclasses, which cannot carry them as ``Annotated``."""

import inspect
from typing import Any

from torchtitan import config
from torchtitan.components.checkpointer import base, dcp
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed import activation_checkpoint as recompute

from rl.types.rules import (
    COSMETIC,
    LEAST_EPS,
    NUMERICS,
    PERFORMANCE,
    SHARE,
    YEAR_S,
    Bounds,
    Effect,
    Fixed,
    NeedsCuda,
    above,
    at_least,
    defaults_of,
)

MAX_RANKS = 16_384
_BETA = Bounds(0, 1, below=True)

Rules = dict[str, tuple[Any, ...]]


def _rules(effect: Effect, fields: str, *others: Bounds | dict[str, Bounds] | NeedsCuda) -> Rules:
    """Return the same rules for each of ``fields``."""
    return dict.fromkeys(fields.split(), (effect, *others))


_RECOMPUTED = "preserve_rng_state determinism_check debug"

HONOURED: dict[type, Rules] = {
    config.ParallelismConfig: _rules(
        PERFORMANCE,
        "fsdp_reshard_after_forward enable_sequence_parallel spmd_backend",
    )
    | _rules(PERFORMANCE, "enable_fsdp_symm_mem", NeedsCuda((True,), "False"))
    | _rules(PERFORMANCE, "context_parallel_load_balancer", NeedsCuda(("ptrr",), "'headtail'"))
    | _rules(
        PERFORMANCE,
        "data_parallel_replicate_degree context_parallel_degree tensor_parallel_degree "
        "expert_parallel_degree",
        at_least(1, MAX_RANKS),
    )
    | _rules(PERFORMANCE, "data_parallel_shard_degree", at_least(1, MAX_RANKS, also=(-1,))),
    config.TrainingConfig: _rules(PERFORMANCE, "gc_freq", at_least(1))
    | _rules(NUMERICS, "dtype mixed_precision_param")
    | _rules(NUMERICS, "max_norm", above(0)),
    LRSchedulersContainer.Config: _rules(NUMERICS, "decay_type")
    | _rules(NUMERICS, "warmup_steps", at_least(0))
    | _rules(NUMERICS, "total_steps", at_least(1))
    | _rules(NUMERICS, "decay_ratio min_lr_factor", SHARE),
    OptimizersContainer.Config: _rules(
        NUMERICS, "param_groups implementation optimizer_factory_kwargs_by_name"
    ),
    ParamGroupConfig: _rules(NUMERICS, "pattern optimizer_name")
    | _rules(
        NUMERICS,
        "optimizer_kwargs",
        dict.fromkeys(("lr", "weight_decay"), at_least(0, 1000))
        | dict.fromkeys(("betas", "momentum"), _BETA)
        | {"eps": at_least(LEAST_EPS, 1)},
    ),
    base.BaseCheckpointManager.Config: _rules(
        COSMETIC, "enable folder enable_first_step_checkpoint"
    )
    | _rules(COSMETIC, "interval", at_least(1))
    | _rules(COSMETIC, "keep_latest_k", at_least(2, 10**6, also=(0,)))
    | _rules(NUMERICS, "initial_load_path initial_load_model_only initial_load_in_hf"),
    dcp.CheckpointManager.Config: _rules(
        PERFORMANCE, "async_mode", NeedsCuda(("async_with_pinned_mem",), "'disabled' or 'async'")
    ),
    config.CommConfig: _rules(COSMETIC, "save_traces_folder save_traces_file_prefix")
    | _rules(COSMETIC, "init_timeout_seconds", at_least(1, YEAR_S))
    | _rules(COSMETIC, "trace_buf_size", at_least(0)),
    config.DebugConfig: _rules(PERFORMANCE, "deterministic deterministic_warn_only detect_anomaly"),
    config.CompileConfig: _rules(PERFORMANCE, "enable backend")
    | _rules(PERFORMANCE, "enable_async_tensor_parallel", NeedsCuda((True,), "False")),
    recompute.ActivationCheckpointing.Config: _rules(PERFORMANCE, _RECOMPUTED),
    recompute.SelectiveAC.Config: _rules(PERFORMANCE, "force_recompute_mm_shapes_by_fqns"),
    recompute.MemoryBudgetAC.Config: _rules(PERFORMANCE, "visualize_memory_budget_pareto")
    | _rules(PERFORMANCE, "memory_budget", SHARE)
    | dict.fromkeys(_RECOMPUTED.split(), ()),  # a budget recomputes in compiled code
    Float8LinearConverter.Config: _rules(NUMERICS, "recipe_name filter_fqns emulate"),
    LoRAConverter.Config: _rules(NUMERICS, "target_modules")
    | _rules(NUMERICS, "rank", at_least(1, 65_536))
    | _rules(NUMERICS, "alpha", above(0, 1e6)),
}
"""Rules of the fields that a run uses, by the dataclass that declares the field: an effect, and
bounds if it is a number. All other fields keep their defaults.

Bounds of a list apply to its elements; a dict has bounds by key.
"""

INSTEAD = {
    **dict.fromkeys(("create_seed_checkpoint", "seed"), "seed"),
    **dict.fromkeys(_RECOMPUTED.split(), "memory_budget"),
    **dict.fromkeys(
        ("load_only", "exclude_from_loading", "initial_load_in_hf_quantized"),
        "initial_load_path and initial_load_model_only",
    ),
    "batch_invariant": "deterministic",
    "enable_cpu_offload": "offload_optimizer, colocate or data_parallel_shard_degree",
    "components": "trainer.compile.enable",
    "gc_debug": "gc_freq",
    "global_batch_size": "rollout.prompts_per_step or examples_per_step",
    "last_save_in_hf": "export_every",
    "load_step": "resume",
    "local_batch_size": "trainer.micro_batch_size",
    "model_compile_enabled": "trainer.compile.enable",
    "pipeline_parallel_degree": "data_parallel_shard_degree or tensor_parallel_degree",
    "save_config_file": "output_dir",
    "seq_len": "rollout.max_tokens or task.max_tokens",
    "spmd_typechecking": "detect_anomaly",
    "steps": "steps",
    "train_timeout_seconds": "deadlines.call",
}
"""Fields to set instead of those that a run does not use."""


def titan_rules(kind: type) -> Rules:
    """Return the rules of all fields of ``kind`` that torchtitan declares."""
    titans = [cls for cls in kind.__mro__ if cls.__module__.startswith("torchtitan.")]
    declared = {name for cls in titans for name in inspect.get_annotations(cls)}
    used: Rules = {}
    for cls in reversed(kind.__mro__):
        used |= HONOURED.get(cls, {})
    defaults = defaults_of(kind) if declared else {}
    fix = "Tiller does not use this field of torchtitan"
    fixes = {name: f"{fix}; set {field} instead" for name, field in INSTEAD.items()}
    unused = {
        name: (COSMETIC, Fixed(default, fixes.get(name, fix)))
        for name, default in defaults.items()
        if name in declared and not used.get(name)
    }
    return used | unused
