"""Your own model on your own conversations: --model.hf_path DIR --task.path FILE."""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from rl.config import SFTConfig, SFTDataConfig
from rl.model.shape import ModelConfig
from rl.training.trainer_config import TrainerConfig


def sft_jsonl() -> SFTConfig:
    """A Hugging Face model learns what the assistant writes in given conversations."""
    return SFTConfig(
        steps=200,
        model=ModelConfig(max_seq_len=2048),
        task=SFTDataConfig(max_tokens=2048),
        examples_per_step=32,
        validate_every=50,
        trainer=TrainerConfig(
            optimizer=default_adamw(lr=1e-5, weight_decay=0.0),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.8),
            micro_batch_tokens=8 * 2048,
        ),
    )
