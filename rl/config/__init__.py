"""Configs of runs, one for each trainer."""

from rl.config.dataset import DatasetConfig, DatasetRunConfig
from rl.config.preference import PreferenceConfig, PreferenceDataConfig, RewardModelConfig
from rl.config.rl import (
    CriticConfig,
    EvaluationConfig,
    ReferenceConfig,
    RLConfig,
    RoleConfig,
    RolloutConfig,
    RolloutRecordConfig,
)
from rl.config.run import RecordConfig, RunConfig, SinksConfig, WatchdogConfig
from rl.config.sft import SampledEvaluationConfig, SFTConfig, SFTDataConfig

__all__ = [
    "CriticConfig",
    "DatasetConfig",
    "DatasetRunConfig",
    "EvaluationConfig",
    "PreferenceConfig",
    "PreferenceDataConfig",
    "RLConfig",
    "RecordConfig",
    "ReferenceConfig",
    "RewardModelConfig",
    "RoleConfig",
    "RolloutConfig",
    "RolloutRecordConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SampledEvaluationConfig",
    "SinksConfig",
    "WatchdogConfig",
]
