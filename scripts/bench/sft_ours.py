"""Tiller's side of sft_against_trl.py: configs that train on the files that it writes."""

from typing import Any

from sft_work import BETA, EXAMPLES, LEARNING_RATE, MAX_NORM, MAX_TOKENS, MODEL, PAIRS
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig

from rl.algorithms.sequence_losses import DPOLoss
from rl.config import PreferenceConfig, PreferenceDataConfig, SFTConfig, SFTDataConfig
from rl.config.preference import InitialPolicyConfig
from rl.model.shape import ModelConfig
from rl.training.trainer_config import TrainerConfig

DATA: dict[str, Any] = {"max_tokens": MAX_TOKENS, "held_out_fraction": 0.0}


def sft_words() -> SFTConfig:
    """Return the config that matches sft_trl.py: cross-entropy of completions, in fp32."""
    return SFTConfig(
        model=ModelConfig(max_seq_len=MODEL["max_seq_len"]),
        task=SFTDataConfig(**DATA),
        examples_per_step=EXAMPLES,
        trainer=_trainer(),
        quiet=True,
    )


def dpo_words() -> PreferenceConfig:
    """Return the config that matches sft_trl.py's DPO, in fp32."""
    return PreferenceConfig(
        model=ModelConfig(max_seq_len=MODEL["max_seq_len"]),
        task=PreferenceDataConfig(**DATA),
        examples_per_step=PAIRS,
        loss=DPOLoss.Config(beta=BETA),
        reference=InitialPolicyConfig(parallelism=_replicas()),
        trainer=_trainer(),
        quiet=True,
    )


def _trainer() -> TrainerConfig:
    return TrainerConfig(
        parallelism=_replicas(),
        training=TrainingConfig(mixed_precision_param="float32", max_norm=MAX_NORM),
        optimizer=default_adamw(lr=LEARNING_RATE, weight_decay=0.0, fused=True),
        micro_batch_tokens=2 * MAX_TOKENS,
    )


def _replicas() -> ParallelismConfig:
    """Return two replicas, as many as TRL has processes."""
    return ParallelismConfig(
        data_parallel_replicate_degree=2,
        data_parallel_shard_degree=1,
        spmd_backend="partial_dtensor",
    )
