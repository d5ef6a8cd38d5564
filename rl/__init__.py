"""Tiller: RL post-training on torchtitan, vLLM and Monarch actors.

The names below are imported at their first use, because importing torch takes seconds.
"""

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.cli.program import begin, is_starting

if TYPE_CHECKING:
    import configs
    from rl.algorithms import advantages, losses
    from rl.algorithms.batch import make_batch
    from rl.config import PreferenceConfig, RewardModelConfig, RLConfig, SFTConfig
    from rl.environments.agent import AgentTask
    from rl.environments.protocol import EnvironmentTask, MessageEnvironment, Opening, Reply
    from rl.environments.task import Score, Task
    from rl.errors import InfrastructureError
    from rl.generation.generator_config import GeneratorConfig
    from rl.model.shape import ModelConfig
    from rl.session.session import Session
    from rl.session.session_config import Role, SessionConfig
    from rl.tasks.rewards import Rewards
    from rl.trainers.algorithm import Algorithm, PolicyGradient
    from rl.trainers.preference import PreferenceTrainer
    from rl.trainers.rl import RLTrainer
    from rl.trainers.sft import SFTTrainer
    from rl.training.trainer_config import AdapterConfig, TrainerConfig
    from rl.types import (
        Batch,
        Completion,
        GenerationRequest,
        Prompt,
        Rollout,
        Sampling,
        Sequence,
    )
    from rl.weights.transport import WeightPushConfig

__all__ = [
    "AdapterConfig",
    "AgentTask",
    "Algorithm",
    "Batch",
    "Completion",
    "EnvironmentTask",
    "GenerationRequest",
    "GeneratorConfig",
    "InfrastructureError",
    "MessageEnvironment",
    "ModelConfig",
    "Opening",
    "PolicyGradient",
    "PreferenceConfig",
    "PreferenceTrainer",
    "Prompt",
    "RLConfig",
    "RLTrainer",
    "Reply",
    "RewardModelConfig",
    "Rewards",
    "Role",
    "Rollout",
    "SFTConfig",
    "SFTTrainer",
    "Sampling",
    "Score",
    "Sequence",
    "Session",
    "SessionConfig",
    "Task",
    "TrainerConfig",
    "WeightPushConfig",
    "advantages",
    "configs",
    "losses",
    "make_batch",
]

_IMPORTS = next(
    each.body for each in ast.parse(Path(__file__).read_text()).body if isinstance(each, ast.If)
)
_SOURCES = {
    alias.name: getattr(each, "module", None)
    for each in _IMPORTS
    if isinstance(each, ast.Import | ast.ImportFrom)
    for alias in each.names
}
"""Module that each name is imported from, as the block above says; None for a module itself."""


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _SOURCES[name]
    return getattr(__import__(module, fromlist=[name]), name) if module else __import__(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if is_starting():
    begin()
