"""Rules of the fields of torchtitan's dataclasses, which cannot carry them as ``Annotated``."""

from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.components.quantization import Float8LinearConverter, QuantizationConverter
from torchtitan.config import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    MemoryBudgetAC,
    SelectiveAC,
)

from rl.rules import COSMETIC, NUMERICS, PERFORMANCE, SHARE, YEAR_S, Bounds, Effect, above, at_least

MAX_RANKS = 16_384
_DEGREE = at_least(1, MAX_RANKS)
_BETA = Bounds(0, 1, below=True)

Rules = dict[str, tuple[Any, ...]]


def _rules(effect: Effect, unbounded: str = "", **bounded: Bounds | dict[str, Bounds]) -> Rules:
    """Return the rules of fields that have the same effect."""
    rules: Rules = dict.fromkeys(unbounded.split(), (effect,))
    return rules | {name: (effect, bounds) for name, bounds in bounded.items()}


TITAN_FIELDS: dict[type, Rules] = {
    ParallelismConfig: _rules(
        PERFORMANCE,
        "fsdp_reshard_after_forward enable_fsdp_symm_mem enable_sequence_parallel spmd_backend "
        "module_fqns_per_model_part pipeline_parallel_schedule pipeline_parallel_schedule_csv "
        "context_parallel_load_balancer context_parallel_ptrr_mask_key",
        data_parallel_replicate_degree=_DEGREE,
        data_parallel_shard_degree=_DEGREE,
        context_parallel_degree=_DEGREE,
        tensor_parallel_degree=_DEGREE,
        expert_parallel_degree=_DEGREE,
        pipeline_parallel_degree=_DEGREE,
        pipeline_parallel_first_stage_less_layers=at_least(0, 1024),
        pipeline_parallel_last_stage_less_layers=at_least(0, 1024),
        pipeline_parallel_layers_per_stage=at_least(1, 1024),
        pipeline_parallel_microbatch_size=at_least(1, 10**6),
    ),
    TrainingConfig: _rules(
        COSMETIC,
        local_batch_size=at_least(1, 10**6),
        global_batch_size=at_least(1, also=(-1,)),
        seq_len=at_least(1, 10**8),
        steps=at_least(1),
    )
    | _rules(PERFORMANCE, "enable_cpu_offload disable_cuda_graphs gc_debug", gc_freq=at_least(1))
    | _rules(NUMERICS, "dtype mixed_precision_param mixed_precision_reduce", max_norm=above(0)),
    LRSchedulersContainer.Config: _rules(
        NUMERICS,
        "decay_type",
        warmup_steps=at_least(0),
        total_steps=at_least(1),
        decay_ratio=SHARE,
        min_lr_factor=SHARE,
    ),
    OptimizersContainer.Config: _rules(
        NUMERICS, "param_groups implementation optimizer_factory_kwargs_by_name"
    ),
    ParamGroupConfig: _rules(
        NUMERICS,
        "pattern optimizer_name",
        optimizer_kwargs={
            "lr": at_least(0, 1000),
            "betas": _BETA,
            "eps": at_least(0, 1),
            "weight_decay": at_least(0, 1000),
            "momentum": _BETA,
        },
    ),
    BaseCheckpointManager.Config: _rules(
        COSMETIC,
        "enable folder last_save_model_only last_save_in_hf export_dtype "
        "enable_first_step_checkpoint create_seed_checkpoint load_only",
        interval=at_least(1),
        keep_latest_k=at_least(2, 10**6, also=(0,)),
    )
    | _rules(
        NUMERICS,
        "initial_load_path initial_load_model_only initial_load_in_hf "
        "initial_load_in_hf_quantized exclude_from_loading",
        load_step=at_least(0, also=(-1,)),
    ),
    CheckpointManager.Config: _rules(PERFORMANCE, "async_mode"),
    CommConfig: _rules(
        COSMETIC,
        "save_traces_folder save_traces_file_prefix mode",
        init_timeout_seconds=at_least(1, YEAR_S),
        train_timeout_seconds=at_least(1, YEAR_S),
        trace_buf_size=at_least(0),
    ),
    DebugConfig: _rules(
        COSMETIC, "spmd_typechecking print_config save_config_file enable_structured_logging"
    )
    | _rules(PERFORMANCE, "deterministic deterministic_warn_only detect_anomaly batch_invariant")
    | _rules(NUMERICS, "moe_force_load_balance", seed=at_least(0, 2**63 - 1)),
    CompileConfig: _rules(PERFORMANCE, "enable enable_async_tensor_parallel components backend"),
    ActivationCheckpointing.Config: _rules(
        PERFORMANCE, "preserve_rng_state determinism_check debug"
    ),
    SelectiveAC.Config: _rules(PERFORMANCE, "force_recompute_mm_shapes_by_fqns"),
    MemoryBudgetAC.Config: _rules(
        PERFORMANCE, "visualize_memory_budget_pareto", memory_budget=SHARE
    ),
    QuantizationConverter.Config: _rules(NUMERICS, "model_compile_enabled"),
    Float8LinearConverter.Config: _rules(NUMERICS, "recipe_name filter_fqns emulate"),
    LoRAConverter.Config: _rules(
        NUMERICS, "target_modules", rank=at_least(1, 65_536), alpha=above(0, 1e6)
    ),
}
"""Rules by the dataclass that declares the field: an effect, and bounds if it is a number.

Bounds of a list are those of its elements; a dict has bounds by key.
"""


def titan_rules(kind: type) -> Rules:
    """Return the rules of all fields of ``kind`` that torchtitan declares."""
    listed = (TITAN_FIELDS.get(each, {}) for each in kind.__mro__)
    return {name: rules for fields in listed for name, rules in fields.items()}
