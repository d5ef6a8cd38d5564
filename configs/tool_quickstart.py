"""Calling a tool and using its answer, from random weights, in minutes on a laptop's CPU.

A random policy never writes a tool call, so demonstrations come first. They end before the model
can copy numbers reliably; reinforcement goes on from there. ::

    python scripts/make_tiny_model.py --calculator --model-dir DIR --data FILE --lines 600
    python -m rl.train --config tool_demonstrations --model.hf_path DIR --task.path FILE \\
        --output-dir runs/sft
    python -m rl.train --config tool_quickstart --model.hf_path runs/sft/export
"""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from rl.algorithms.losses import grpo
from rl.config import (
    EvaluationConfig,
    PolicyGradientConfig,
    RLConfig,
    RolloutConfig,
    SFTConfig,
    SFTDataConfig,
)
from rl.model.shape import ModelConfig
from rl.tasks.calculator import Calculator
from rl.training.trainer_config import TrainerConfig

LONGEST = 512
"""Length of an episode, in tokens. The schemas of three tools take most of it."""


def tool_demonstrations() -> SFTConfig:
    """A tiny Qwen3 learns from conversations what a tool call looks like."""
    return SFTConfig(
        steps=360,
        model=ModelConfig(max_seq_len=LONGEST),
        task=SFTDataConfig(max_tokens=LONGEST),
        examples_per_step=16,
        trainer=TrainerConfig(
            optimizer=default_adamw(lr=3e-3, weight_decay=0.0),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.0),
            micro_batch_tokens=16 * LONGEST,
        ),
    )


def tool_quickstart() -> RLConfig:
    """The model of ``tool_demonstrations`` learns by GRPO to call the right tool."""
    return RLConfig(
        steps=100,
        task=Calculator.Config(
            operations=1, max_prompt_tokens=LONGEST, max_episode_tokens=LONGEST, max_turns=3
        ),
        model=ModelConfig(max_seq_len=LONGEST),
        rollout=RolloutConfig(prompts_per_step=16, samples_per_prompt=8, max_tokens=48),
        algorithm=PolicyGradientConfig(loss=grpo(entropy_coef=0.001)),
        trainer=TrainerConfig(
            optimizer=default_adamw(lr=1e-3, weight_decay=0.0),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.0),
            micro_batch_tokens=32 * LONGEST,
        ),
        evaluation=EvaluationConfig(prompts=128),
    )
