"""Configs of runs with more models than the shipped ones."""

from configs.dpo_jsonl import dpo_jsonl
from configs.qwen3 import qwen3_0_6b
from rl.algorithms.advantages import GAE
from rl.algorithms.sequence_losses import KTOLoss
from rl.config import PreferenceConfig, RLConfig


def ppo() -> RLConfig:
    """PPO with a critic and a reference."""
    config = qwen3_0_6b()
    config.algorithm.advantage = GAE.Config()
    config.algorithm.loss.kl_coef = 0.1
    config.generator.replicas = 4
    return config


def kto() -> PreferenceConfig:
    """KTO."""
    config = dpo_jsonl()
    config.loss = KTOLoss.Config()
    return config
