"""In which fields two configs differ, and what that means for a run's numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from rl.config import RLConfig
from rl.frozen import changed_fields, frozen

Mark = Literal["numerics", "performance", "cosmetic"]
"""It changes what is computed; only where and how fast, with the same samples and gradients up to
rounding; neither."""

# Of the patterns that a field matches the longest counts. A section has one only where all its
# fields are of one kind.
_NUMERICS = """
    task.* model.* algorithm.* steps seed roles* reference.refresh_every critic.loss.*
    *.optimizer.* *.lr_scheduler.* rollout.prompts_per_step rollout.samples_per_prompt
    rollout.max_tokens rollout.temperature rollout.top_p rollout.top_k rollout.max_staleness
    rollout.pipeline rollout.max_resampled_groups trainer.training.dtype
    trainer.training.mixed_precision_* trainer.training.max_norm trainer.float8* trainer.lora*
    trainer.checkpoint.initial_load_* trainer.checkpoint.exclude_from_loading
    trainer.checkpoint.load_step trainer.debug.seed trainer.debug.moe_force_load_balance
    generator.dtype generator.inflight_policy generator.update deadlines.reward
"""
_PERFORMANCE = """
    model.attention model.max_seq_len rollout.stream_chunks rollout.reward_workers *.parallelism.*
    trainer.nodes trainer.training.enable_cpu_offload trainer.training.disable_cuda_graphs
    trainer.training.gc_* trainer.activation_checkpoint* trainer.compile.*
    trainer.checkpoint.async_mode trainer.micro_batch_size trainer.micro_batch_tokens
    trainer.packing trainer.logits_mib trainer.debug.deterministic* trainer.debug.batch_invariant
    trainer.debug.detect_anomaly generator.replicas generator.nodes
    generator.tensor_parallel_degree generator.expert_parallel generator.max_running_requests
    generator.max_batched_tokens generator.kv_cache_gib generator.gpu_memory_utilization
    generator.enforce_eager generator.block_size generator.prefix_caching weights.transport
    weights.delta hardware.* slurm.* kubernetes.* colocate
"""
_COSMETIC = """
    rollout.max_lost rollout.recorded_per_step trainer.max_skipped_steps trainer.checkpoint.*
    trainer.comm.* trainer.debug.* trainer.training.local_batch_size
    trainer.training.global_batch_size trainer.training.seq_len trainer.training.steps
    weights.digests weights.canary_tolerance weights.min_gb_s evaluation.* deadlines.* watchdog.*
    max_restarts output_dir resume quiet
"""
MARKS: dict[str, Mark] = {
    **dict.fromkeys(_NUMERICS.split(), "numerics"),
    **dict.fromkeys(_PERFORMANCE.split(), "performance"),
    **dict.fromkeys(_COSMETIC.split(), "cosmetic"),
}


@dataclass(frozen=True, slots=True)
class Change:
    """A field in which two configs differ."""

    mark: Mark
    change: str
    """``field: old → new``."""


def mark_of(field: str) -> Mark:
    """What a change of ``field`` means. Raises KeyError for one that no pattern matches."""
    matching = [pattern for pattern in MARKS if fnmatchcase(field, pattern)]
    if not matching:
        raise KeyError(f"{field}: rl.plan.diff has no mark for it")
    return MARKS[max(matching, key=len)]


def changes(before: RLConfig, after: RLConfig) -> list[Change]:
    """What differs, by what it means."""
    found = [
        Change(mark_of(text.partition(": ")[0]), text)
        for text in changed_fields(frozen(before), frozen(after))
    ]
    return sorted(
        found, key=lambda change: ("numerics", "performance", "cosmetic").index(change.mark)
    )


def leaves(config: Any, name: str = "") -> Iterator[str]:
    """Names of all fields of a frozen config that have none below them."""
    if isinstance(config, dict) and config:
        for key, value in config.items():
            yield from leaves(value, f"{name}.{key}" if name else key)
    else:
        yield name
