"""RunConfig: everything a run is a function of."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import Configurable

from rl.algorithms.losses import PolicyLoss
from rl.generation.config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.tasks.base import Task
from rl.training.config import TrainerConfig
from rl.weights.config import WeightPushConfig


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """What is sampled for each step."""

    prompts_per_step: int = 32
    """Prompts per optimizer step."""

    samples_per_prompt: int = 8
    """Completions per prompt: the group that advantages compare."""

    max_tokens: int = 256
    """Longest completion, in tokens."""

    temperature: float = 1.0
    """Above 0. Behaviour and trainer log-probs are both of this distribution."""

    top_p: float = 1.0
    """Below 1 is refused: the trainer could not compute the same log-probs."""

    top_k: int = 0
    """Above 0 is refused, as top_p below 1 is."""

    max_staleness: int = 0
    """Optimizer steps by which the weights that sampled a rollout may be older than those it trains. 0: one batch is
    generated, then trained on. 1: the next batch is generated meanwhile, and the push runs behind both."""

    recorded_per_step: int = 4
    """Rollouts of each step that are written to rollouts.jsonl."""


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """What the rollouts teach."""

    loss: PolicyLoss.Config = field(default_factory=PolicyLoss.Config)
    """What each token costs; ``grpo()`` and ``dapo()`` of rl.algorithms.losses make two."""

    normalize_std: bool = True
    """Whether advantages are divided by their group's standard deviation."""


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out prompts after training."""

    prompts: int = 256
    """How many, 0 for no evaluation; fewer where the task holds out fewer."""

    samples: int = 4
    """k of pass@k: completions per prompt at the rollouts' temperature. 0 for greedy alone."""


@dataclass(kw_only=True, slots=True)
class DeadlineConfig:
    """How long anything is waited for, in seconds, before the run fails and says what was silent."""

    start: float = 600.0
    """For a mesh to start, imports and model included."""

    call: float = 600.0
    """For any call to an actor, such as generating a step's completions."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One training run."""

    data: Task.Config
    """What to train on: the config of a Task."""

    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weights: WeightPushConfig = field(default_factory=WeightPushConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)

    steps: int = 100
    """Optimizer steps."""

    seed: int = 0
    """Of the initial weights, the order of prompts and every completion."""

    output_dir: str = ""
    """The run folder; empty for runs/NAME-TIME."""

    resume: bool = False
    """Go on from the newest complete checkpoint in output_dir."""

    quiet: bool = False
    """Print nothing but errors."""


def frozen(value: Any) -> Any:
    """``value`` as JSON-able data; configs of exchangeable parts carry the ``type`` they build."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: frozen(getattr(value, f.name)) for f in dataclasses.fields(value)}
        owner = type(value)
        return (
            {"type": f"{owner.__module__}.{owner.__qualname__}", **fields}
            if isinstance(value, Configurable.Config)
            else fields
        )
    if isinstance(value, dict):
        return {str(k): frozen(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def changed_fields(before: Any, after: Any, name: str = "") -> list[str]:
    """``field: old → new`` for every leaf in which two frozen configs differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [*before, *(key for key in after if key not in before)]
        return [
            change
            for key in names
            for change in changed_fields(before.get(key), after.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if before == after else [f"{name}: {before} → {after}"]
