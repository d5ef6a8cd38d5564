"""A published model of 135 million parameters learns word problems on two cores:
docs/real-model.md has the commands.
"""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig

from rl.algorithms.losses import dapo
from rl.config import (
    EvaluationConfig,
    PolicyGradientConfig,
    RLConfig,
    RolloutConfig,
    SFTConfig,
    SFTDataConfig,
)
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.training.trainer_config import TrainerConfig


def smollm2() -> RLConfig:
    """SmolLM2-135M-Instruct learns word problems by RL alone, in bfloat16.

    Each problem follows a solved one, which shows the form of an answer. Partial credit has the
    model write a calculation for each part of a problem. A high temperature and groups that are
    replaced keep the rewards of a group apart, so that it learns arithmetic.
    """
    return RLConfig(
        steps=48,
        task=Gsm8kJsonl.Config(
            system_prompt="Calculate.",
            instruction="",
            max_prompt_tokens=160,
            partial_credit=0.5,
        ),
        model=ModelConfig(max_seq_len=208),
        rollout=RolloutConfig(
            prompts_per_step=64,
            samples_per_prompt=4,
            max_tokens=40,
            temperature=1.2,
            max_resampled_groups=64,
        ),
        algorithm=PolicyGradientConfig(loss=dapo(), prompts_per_minibatch=32),
        trainer=TrainerConfig(
            optimizer=default_adamw(lr=3e-5, weight_decay=0.0),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.4),
            micro_batch_tokens=3072,
            prompt_sharing=8,
            training=TrainingConfig(mixed_precision_param="bfloat16"),
            zero_gradient="skip",
        ),
        generator=GeneratorConfig(dtype="bfloat16"),
        evaluation=EvaluationConfig(prompts=200, samples=1, every=10),
    )


def smollm2_sft() -> SFTConfig:
    """SmolLM2-135M-Instruct learns from 3,200 solved word problems, in bfloat16."""
    return SFTConfig(
        steps=100,
        model=ModelConfig(max_seq_len=160),
        task=SFTDataConfig(max_tokens=160),
        examples_per_step=32,
        validate_every=0,
        trainer=TrainerConfig(
            optimizer=default_adamw(lr=1e-4, weight_decay=0.0),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8),
            micro_batch_tokens=2048,
            training=TrainingConfig(mixed_precision_param="bfloat16"),
        ),
    )


def smollm2_after_sft() -> RLConfig:
    """The model of smollm2_sft learns by RL; --model.hf_path is its export."""
    config = smollm2()
    config.steps = 40
    config.task = Gsm8kJsonl.Config(
        instruction="Answer with one line: #### NUMBER", max_prompt_tokens=128
    )
    config.model.max_seq_len = 176
    config.rollout = RolloutConfig(
        prompts_per_step=16, samples_per_prompt=8, max_tokens=32, max_resampled_groups=32
    )
    config.algorithm.prompts_per_minibatch = 0  # one update a step
    config.trainer.optimizer = default_adamw(lr=2e-5, weight_decay=0.0)
    config.trainer.lr_scheduler.decay_ratio = 0.0
    config.trainer.micro_batch_tokens = 2048
    return config
