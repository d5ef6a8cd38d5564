"""Configs of runs, one for each trainer."""

from rl.config.rl import (
    CriticConfig,
    EvaluationConfig,
    ReferenceConfig,
    RLConfig,
    RoleConfig,
    RolloutConfig,
)
from rl.config.run import RunConfig, WatchdogConfig
from rl.config.sft import SFTConfig, SFTDataConfig

__all__ = [
    "CriticConfig",
    "EvaluationConfig",
    "RLConfig",
    "ReferenceConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "WatchdogConfig",
]
