"""A reward model from your own preferences: --model.hf_path DIR --task.path FILE."""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from rl.config import PreferenceDataConfig, RewardModelConfig
from rl.model.shape import ModelConfig
from rl.training.trainer_config import TrainerConfig


def reward_model_jsonl() -> RewardModelConfig:
    """A Hugging Face model with a value head learns to score the chosen answers of a file or
    dataset above the rejected ones.
    """
    return RewardModelConfig(
        steps=200,
        model=ModelConfig(max_seq_len=2048),
        task=PreferenceDataConfig(max_tokens=2048),
        examples_per_step=32,
        validate_every=50,
        trainer=TrainerConfig(
            optimizer=default_adamw(lr=1e-5, weight_decay=0.0),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.8),
            micro_batch_tokens=8 * 2048,
        ),
    )
