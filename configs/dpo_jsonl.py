"""Your own model on your own preferences: --model.hf_path DIR --task.path FILE."""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from rl.algorithms.sequence_losses import DPOLoss
from rl.config import PreferenceConfig, PreferenceDataConfig
from rl.model.shape import ModelConfig
from rl.training.trainer_config import TrainerConfig


def dpo_jsonl() -> PreferenceConfig:
    """A Hugging Face model learns to prefer the chosen answers of a file or dataset by DPO."""
    return PreferenceConfig(
        steps=200,
        model=ModelConfig(max_seq_len=2048),
        task=PreferenceDataConfig(max_tokens=2048),
        loss=DPOLoss.Config(beta=0.1),
        examples_per_step=32,
        validate_every=50,
        trainer=TrainerConfig(
            optimizer=default_adamw(lr=5e-7, weight_decay=0.0),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.8),
            micro_batch_tokens=8 * 2048,
        ),
    )
