"""Configs of runs, one for each trainer."""

from torchtitan.config import Configurable

from rl.config.algorithm import AlgorithmConfig, PolicyGradientConfig
from rl.config.dataset import DatasetConfig, DatasetRunConfig
from rl.config.other_names import refuse_unknown
from rl.config.preference import PreferenceConfig, PreferenceDataConfig, RewardModelConfig
from rl.config.rl import CriticConfig, ReferenceConfig, RLConfig, RoleConfig
from rl.config.rollout import (
    BestConfig,
    EvaluationConfig,
    RecordConfig,
    RolloutConfig,
    RolloutRecordConfig,
)
from rl.config.run import RunConfig, SamplingRunConfig, SinksConfig, WatchdogConfig
from rl.config.serve import ServeConfig
from rl.config.sft import SampledEvaluationConfig, SFTConfig, SFTDataConfig
from rl.session.session_config import SessionConfig

__all__ = [
    "AlgorithmConfig",
    "BestConfig",
    "CriticConfig",
    "DatasetConfig",
    "DatasetRunConfig",
    "EvaluationConfig",
    "PolicyGradientConfig",
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
    "SamplingRunConfig",
    "ServeConfig",
    "SinksConfig",
    "WatchdogConfig",
]

for _kind in (
    *(Configurable.Config, RunConfig, SamplingRunConfig, DatasetRunConfig, DatasetConfig),
    *(RLConfig, SFTConfig, PreferenceConfig, RewardModelConfig, ServeConfig),
    SessionConfig,
):
    refuse_unknown(_kind)
