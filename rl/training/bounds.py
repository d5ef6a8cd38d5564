"""Bounds of the numeric fields of torchtitan's dataclasses, which cannot carry rules of
their own.
"""

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from rl.rules import SHARE, YEAR_S, Bounds, above, at_least

MAX_RANKS = 16_384
_DEGREE = at_least(1, MAX_RANKS)
_BETA = Bounds(0, 1, below=True)

TORCHTITAN_BOUNDS: dict[type, dict[str, Bounds]] = {
    ParallelismConfig: {
        "data_parallel_replicate_degree": _DEGREE,
        "data_parallel_shard_degree": _DEGREE,
        "context_parallel_degree": _DEGREE,
        "tensor_parallel_degree": _DEGREE,
        "expert_parallel_degree": _DEGREE,
        "pipeline_parallel_degree": _DEGREE,
        "pipeline_parallel_first_stage_less_layers": at_least(0, 1024),
        "pipeline_parallel_last_stage_less_layers": at_least(0, 1024),
        "pipeline_parallel_layers_per_stage": at_least(1, 1024),
        "pipeline_parallel_microbatch_size": at_least(1, 10**6),
    },
    TrainingConfig: {
        "local_batch_size": at_least(1, 10**6),
        "global_batch_size": at_least(1, also=(-1,)),
        "seq_len": at_least(1, 10**8),
        "max_norm": above(0),
        "steps": at_least(1),
        "gc_freq": at_least(1),
    },
    LRSchedulersContainer.Config: {
        "warmup_steps": at_least(0),
        "total_steps": at_least(1),
        "decay_ratio": SHARE,
        "min_lr_factor": SHARE,
    },
    ParamGroupConfig: {
        "optimizer_kwargs.lr": at_least(0, 1000),
        "optimizer_kwargs.betas": _BETA,
        "optimizer_kwargs.eps": at_least(0, 1),
        "optimizer_kwargs.weight_decay": at_least(0, 1000),
        "optimizer_kwargs.momentum": _BETA,
    },
    CheckpointManager.Config: {
        "interval": at_least(1),
        "keep_latest_k": at_least(2, 10**6, also=(0,)),
        "load_step": at_least(0, also=(-1,)),
    },
    CommConfig: {
        "init_timeout_seconds": at_least(1, YEAR_S),
        "train_timeout_seconds": at_least(1, YEAR_S),
        "trace_buf_size": at_least(0),
    },
    DebugConfig: {"seed": at_least(0, 2**63 - 1)},
    MemoryBudgetAC.Config: {"memory_budget": SHARE},
    LoRAConverter.Config: {"rank": at_least(1, 65_536), "alpha": above(0, 1e6)},
}
"""By dataclass, then by field. A dict's entries are named FIELD.KEY, a list's elements as the
list."""
