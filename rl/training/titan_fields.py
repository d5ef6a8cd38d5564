"""Rules of the fields of torchtitan's dataclasses, which cannot carry them as ``Annotated``."""

from typing import Any

from torchtitan import config
from torchtitan.components.checkpointer import base, dcp
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.components.quantization import Float8LinearConverter, QuantizationConverter
from torchtitan.distributed import activation_checkpoint as recompute

from rl.rules import COSMETIC, NUMERICS, PERFORMANCE, SHARE, YEAR_S, Bounds, Effect, above, at_least

MAX_RANKS = 16_384
_BETA = Bounds(0, 1, below=True)

Rules = dict[str, tuple[Any, ...]]


def _rules(effect: Effect, fields: str, *bounds: Bounds | dict[str, Bounds]) -> Rules:
    """Return the same rules for each of ``fields``."""
    return dict.fromkeys(fields.split(), (effect, *bounds))


TITAN_FIELDS: dict[type, Rules] = {
    config.ParallelismConfig: _rules(
        PERFORMANCE,
        "fsdp_reshard_after_forward enable_fsdp_symm_mem enable_sequence_parallel spmd_backend "
        "module_fqns_per_model_part pipeline_parallel_schedule pipeline_parallel_schedule_csv "
        "context_parallel_load_balancer context_parallel_ptrr_mask_key",
    )
    | _rules(
        PERFORMANCE,
        "data_parallel_replicate_degree context_parallel_degree tensor_parallel_degree "
        "expert_parallel_degree pipeline_parallel_degree",
        at_least(1, MAX_RANKS),
    )
    | _rules(PERFORMANCE, "data_parallel_shard_degree", at_least(1, MAX_RANKS, also=(-1,)))
    | _rules(
        PERFORMANCE,
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers",
        at_least(0, 1024),
    )
    | _rules(PERFORMANCE, "pipeline_parallel_layers_per_stage", at_least(1, 1024))
    | _rules(PERFORMANCE, "pipeline_parallel_microbatch_size", at_least(1, 10**6)),
    config.TrainingConfig: _rules(COSMETIC, "local_batch_size", at_least(1, 10**6))
    | _rules(COSMETIC, "global_batch_size", at_least(1, also=(-1,)))
    | _rules(COSMETIC, "seq_len", at_least(1, 10**8))
    | _rules(COSMETIC, "steps", at_least(1))
    | _rules(PERFORMANCE, "enable_cpu_offload disable_cuda_graphs gc_debug")
    | _rules(PERFORMANCE, "gc_freq", at_least(1))
    | _rules(NUMERICS, "dtype mixed_precision_param mixed_precision_reduce")
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
        | {"eps": at_least(0, 1)},
    ),
    base.BaseCheckpointManager.Config: _rules(
        COSMETIC,
        "enable folder last_save_model_only last_save_in_hf export_dtype "
        "enable_first_step_checkpoint create_seed_checkpoint load_only",
    )
    | _rules(COSMETIC, "interval", at_least(1))
    | _rules(COSMETIC, "keep_latest_k", at_least(2, 10**6, also=(0,)))
    | _rules(
        NUMERICS,
        "initial_load_path initial_load_model_only initial_load_in_hf "
        "initial_load_in_hf_quantized exclude_from_loading",
    )
    | _rules(NUMERICS, "load_step", at_least(0, also=(-1,))),
    dcp.CheckpointManager.Config: _rules(PERFORMANCE, "async_mode"),
    config.CommConfig: _rules(COSMETIC, "save_traces_folder save_traces_file_prefix mode")
    | _rules(COSMETIC, "init_timeout_seconds train_timeout_seconds", at_least(1, YEAR_S))
    | _rules(COSMETIC, "trace_buf_size", at_least(0)),
    config.DebugConfig: _rules(
        COSMETIC, "spmd_typechecking print_config save_config_file enable_structured_logging"
    )
    | _rules(PERFORMANCE, "deterministic deterministic_warn_only detect_anomaly batch_invariant")
    | _rules(NUMERICS, "moe_force_load_balance")
    | _rules(NUMERICS, "seed", at_least(0, 2**63 - 1)),
    config.CompileConfig: _rules(
        PERFORMANCE, "enable enable_async_tensor_parallel components backend"
    ),
    recompute.ActivationCheckpointing.Config: _rules(
        PERFORMANCE, "preserve_rng_state determinism_check debug"
    ),
    recompute.SelectiveAC.Config: _rules(PERFORMANCE, "force_recompute_mm_shapes_by_fqns"),
    recompute.MemoryBudgetAC.Config: _rules(PERFORMANCE, "visualize_memory_budget_pareto")
    | _rules(PERFORMANCE, "memory_budget", SHARE),
    QuantizationConverter.Config: _rules(NUMERICS, "model_compile_enabled"),
    Float8LinearConverter.Config: _rules(NUMERICS, "recipe_name filter_fqns emulate"),
    LoRAConverter.Config: _rules(NUMERICS, "target_modules")
    | _rules(NUMERICS, "rank", at_least(1, 65_536))
    | _rules(NUMERICS, "alpha", above(0, 1e6)),
}
"""Rules by the dataclass that declares the field: an effect, and bounds if it is a number.

Bounds of a list apply to its elements; a dict has bounds by key.
"""


def titan_rules(kind: type) -> Rules:
    """Return the rules of all fields of ``kind`` that torchtitan declares."""
    listed = (TITAN_FIELDS.get(each, {}) for each in kind.__mro__)
    return {name: rules for fields in listed for name, rules in fields.items()}
