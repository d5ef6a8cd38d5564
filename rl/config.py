"""RunConfig: everything a run is a function of."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

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
    """Optimizer steps by which the weights that drew any token may be older than those it trains. 0 is lockstep: one
    batch is generated, then trained on. Above it, generation, scoring, training and the push run side by side."""

    pipeline: Literal["deterministic", "asynchronous"] = "deterministic"
    """What decides which weights draw a token.

    - ``deterministic``: the config. Batch k comes from exactly the weights of step k - max_staleness, in the order of
      the prompts: the same numbers in every run, and after every restart.
    - ``asynchronous``: the clock. Weights change under requests in flight, and groups are trained on as they finish,
      long ones passed over for as long as the bound allows.
    """

    parts_per_step: int = 1
    """Into how many parts a step's groups are cut, each trained on as soon as its groups have finished. The gradient
    is the same. Above 1 only where the pipeline is asynchronous."""

    max_replacements: int = 0
    """Groups per step that are put aside because all their rewards are equal, which teaches nothing, with the next
    prompts in their place (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2)."""

    reward_workers: int = 1
    """Processes that score completions. 0 scores in the controller's own, where a reward that hangs or crashes takes
    the run with it."""

    max_lost: float = 0.1
    """Share of the last 100 groups, or of one step's where these are more, that may be lost because their reward
    raised, hung or made no sense. Above it the run fails."""

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
    """Held-out prompts, after training and on the way."""

    every: int = 0
    """Steps between evaluations on the way, which run behind training; 0 for none. They go to evaluations.jsonl."""

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

    heartbeat: float = 60.0
    """For any sign of life of a rank; one that gives none is treated as dead. 0 asks for none."""

    reward: float = 60.0
    """For the rewards of one group."""


Action = Literal["ignore", "warn", "fail"]
"""What becomes of an alarm: it is counted in any case, a warning is shown, a failure ends the run."""


@dataclass(kw_only=True, slots=True)
class WatchdogConfig:
    """What is watched, from which value on it is an alarm, and what becomes of it. Every alarm is counted in the
    metrics, as ``watchdog/NAME``."""

    stalled: Action = "fail"
    stalled_s: float = 1800.0
    """Seconds without a finished step."""

    flat: Action = "warn"
    flat_steps: int = 10
    """Steps in a row in which no group had an advantage."""

    starving: Action = "warn"
    starving_share: float = 0.9
    """Share of a step above which the trainer waits for rollouts, starving_steps in a row; only with max_staleness."""
    starving_steps: int = 10

    entropy: Action = "warn"
    entropy_min: float = 0.0
    """Mean entropy of a token, in nats, below which the policy has collapsed; 0 for none."""
    entropy_max: float = 0.0
    """Above which it has dissolved; 0 for none."""

    drift: Action = "warn"
    drift_max: float = 0.0
    """``kl/behaviour``, in nats per token, above which trainer and generators disagree; 0 for none."""

    non_finite: Action = "warn"
    """A loss or a gradient norm that is not finite. The step is skipped in any case, and trainer.max_skipped_steps in
    a row end the run."""


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
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)

    max_restarts: int = 3
    """Times that a dead mesh, trainer or generator, is started again without progress in between; one more ends the
    run. Progress is a new checkpoint of the trainer's, a completion of the generator's."""

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
