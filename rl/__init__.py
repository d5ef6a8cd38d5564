"""Tiller: RL post-training on torchtitan, vLLM and Monarch actors.

The names below are imported at their first use, because importing torch takes seconds.
"""

from importlib import import_module
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
    from rl.tasks.judge import Judge, JudgeConfig
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
    "Judge",
    "JudgeConfig",
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

_MODULES = {
    "rl.algorithms.batch": "make_batch",
    "rl.config": "PreferenceConfig RewardModelConfig RLConfig SFTConfig",
    "rl.environments.agent": "AgentTask",
    "rl.environments.protocol": "EnvironmentTask MessageEnvironment Opening Reply",
    "rl.environments.task": "Score Task",
    "rl.errors": "InfrastructureError",
    "rl.generation.generator_config": "GeneratorConfig",
    "rl.model.shape": "ModelConfig",
    "rl.session.session": "Session",
    "rl.session.session_config": "Role SessionConfig",
    "rl.tasks.judge": "Judge JudgeConfig",
    "rl.tasks.rewards": "Rewards",
    "rl.trainers.algorithm": "Algorithm PolicyGradient",
    "rl.trainers.preference": "PreferenceTrainer",
    "rl.trainers.rl": "RLTrainer",
    "rl.trainers.sft": "SFTTrainer",
    "rl.training.trainer_config": "AdapterConfig TrainerConfig",
    "rl.types": "Batch Completion GenerationRequest Prompt Rollout Sampling Sequence",
    "rl.weights.transport": "WeightPushConfig",
}
_SOURCES = {
    "advantages": "rl.algorithms.advantages",
    "configs": "configs",
    "losses": "rl.algorithms.losses",
    **{name: f"{module}:{name}" for module, names in _MODULES.items() for name in names.split()},
}


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _SOURCES[name].partition(":")
    source = import_module(module)
    return getattr(source, attribute) if attribute else source


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if is_starting():
    begin()
