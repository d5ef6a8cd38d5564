"""Configs of the runs that are checked."""

from dataclasses import replace

from torchtitan.components.optimizer import default_adamw

from configs.quickstart import quickstart
from rl.config import EvaluationConfig, RLConfig
from scripts.gpu_check.setting import QWEN3_0_6B


def copying() -> RLConfig:
    """The quickstart with small steps."""
    config = quickstart()
    config.rollout = replace(config.rollout, prompts_per_step=8, samples_per_prompt=4)
    config.evaluation = EvaluationConfig(prompts=8, samples=0)
    config.generator.kv_cache_gib = 0.05
    config.generator.gpu_memory_utilization = 0.4
    return config


def copying_0_6b() -> RLConfig:
    """The same in bfloat16 with the layers of Qwen3-0.6B, which trainer and generator hold."""
    config = copying()
    config.model = replace(QWEN3_0_6B, vocab_size=16, max_seq_len=32)
    config.trainer.training.mixed_precision_param = "bfloat16"
    config.trainer.optimizer = default_adamw(lr=1e-4, weight_decay=0.0)
    config.generator.dtype = "bfloat16"
    return config
