"""Copying digits, from random weights, in about a minute on a laptop's CPU."""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from rl.algorithms.losses import grpo
from rl.config import EvaluationConfig, PolicyGradientConfig, RLConfig, RolloutConfig
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.tasks.copy_digits import CopyDigits
from rl.training.trainer_config import TrainerConfig


def quickstart() -> RLConfig:
    """A Qwen3 of 100 thousand parameters learns to copy three digits by GRPO with an
    entropy bonus.
    """
    return RLConfig(
        steps=200,
        task=CopyDigits.Config(digits=3, max_prompt_tokens=16),
        model=ModelConfig(
            vocab_size=16,
            dim=64,
            n_layers=2,
            n_heads=2,
            n_kv_heads=2,
            head_dim=32,
            hidden_dim=192,
            max_seq_len=32,
        ),
        rollout=RolloutConfig(prompts_per_step=32, samples_per_prompt=8, max_tokens=6),
        algorithm=PolicyGradientConfig(loss=grpo(entropy_coef=0.02)),
        trainer=TrainerConfig(
            optimizer=default_adamw(lr=1e-3, weight_decay=0.0),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.0),
            micro_batch_size=256,
        ),
        generator=GeneratorConfig(kv_cache_gib=0.125),
        evaluation=EvaluationConfig(prompts=256, samples=4),
    )
