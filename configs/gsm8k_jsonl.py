"""Your own model on your own word problems: --model.hf_path DIR --task.path FILE."""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from rl.algorithms.losses import dapo
from rl.config import EvaluationConfig, PolicyGradientConfig, RLConfig, RolloutConfig
from rl.model.shape import ModelConfig
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.training.trainer_config import TrainerConfig


def gsm8k_jsonl() -> RLConfig:
    """A Hugging Face model learns to answer problems of GSM8K's form by DAPO's loss."""
    return RLConfig(
        steps=200,
        task=Gsm8kJsonl.Config(max_prompt_tokens=512),
        model=ModelConfig(max_seq_len=1024),
        rollout=RolloutConfig(prompts_per_step=32, samples_per_prompt=8, max_tokens=512),
        algorithm=PolicyGradientConfig(loss=dapo()),
        trainer=TrainerConfig(
            optimizer=default_adamw(lr=1e-6, weight_decay=0.0),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.0),
            micro_batch_size=8,
        ),
        evaluation=EvaluationConfig(prompts=128, samples=4),
    )
