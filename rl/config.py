"""RLConfig: everything a run is a function of."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.config import ParallelismConfig

from rl.algorithms.advantages import AdvantageEstimator, GroupAdvantage
from rl.algorithms.corrections import Correction
from rl.algorithms.kl import AdaptiveKL, Estimator
from rl.algorithms.losses import ClippedLoss, PolicyLoss, ValueLoss
from rl.cluster import HardwareConfig, KubernetesConfig, SlurmConfig
from rl.generation.config import MIN_TEMPERATURE, GeneratorConfig
from rl.model.shape import ModelConfig
from rl.rules import (
    COSMETIC,
    NUMERICS,
    PERFORMANCE,
    SECONDS,
    SHARE,
    SIGNED,
    YEAR_S,
    at_least,
    between,
)
from rl.tasks.base import Task
from rl.training.config import TrainerConfig, one_rank
from rl.types import Head
from rl.weights.config import WeightPushConfig


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """What is sampled for each step."""

    prompts_per_step: Annotated[int, at_least(1, 10**6)] = 32
    """Prompts whose completions a step trains on."""

    samples_per_prompt: Annotated[int, at_least(2, 10**5)] = 8
    """Completions per prompt: the group that advantages compare."""

    max_tokens: Annotated[int, at_least(1, 10**8)] = 256
    """Longest completion, in tokens."""

    temperature: Annotated[float, at_least(MIN_TEMPERATURE, 100)] = 1.0
    """Above 0. Behaviour and trainer log-probs are both of this distribution."""

    top_p: Annotated[float, SHARE] = 1.0
    """Below 1 is refused: the trainer could not compute the same log-probs."""

    top_k: Annotated[int, at_least(0)] = 0
    """Above 0 is refused, as top_p below 1 is."""

    max_staleness: Annotated[int, at_least(0, 10**4)] = 0
    """Steps by which the weights that drew any token may be older than those its step begins with.
    0 is lockstep: one batch is generated, then trained on. Above it, generation, scoring, training
    and the push run side by side."""

    pipeline: Literal["deterministic", "asynchronous"] = "deterministic"
    """What decides which weights draw a token.

    - ``deterministic``: the config. Batch k comes from exactly the weights of step k -
      max_staleness, in the order of the prompts: the same numbers in every run, and after every
      restart.
    - ``asynchronous``: the clock. Weights change under requests in flight, and groups are trained
      on as they finish, long ones passed over for as long as the bound allows.
    """

    stream_chunks: Annotated[int, at_least(1, 10**6), PERFORMANCE] = 1
    """Into how many parts a step's groups are cut, each trained on as soon as its groups have
    finished. The gradient is the same. Above 1 only where the pipeline is asynchronous."""

    max_resampled_groups: Annotated[int, at_least(0, 10**6)] = 0
    """Groups per step that are put aside because all their rewards are equal, which teaches
    nothing, with the next prompts in their place (DAPO's dynamic sampling, arXiv:2503.14476,
    section 3.2)."""

    reward_workers: Annotated[int, at_least(0, 10**4), PERFORMANCE] = 1
    """Processes that score completions; what a reward starts ends with its process. 0 scores in the
    controller's own, where a reward that hangs or crashes takes the run with it, and what it starts
    is not ended."""

    max_lost: Annotated[float, SHARE, COSMETIC] = 0.1
    """Share of the last 100 groups, or of one step's where these are more, that may be lost because
    their reward raised, hung or made no sense. Above it the run fails."""

    recorded_per_step: Annotated[int, at_least(0), COSMETIC] = 4
    """Rollouts of each step that are written to rollouts.jsonl."""


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """What the rollouts teach, and in how many optimizer steps."""

    advantage: AdvantageEstimator.Config = field(default_factory=GroupAdvantage.Config)
    """How much better a token was than expected."""

    loss: PolicyLoss.Config = field(default_factory=ClippedLoss.Config)
    """What each token costs; ``grpo()``, ``dapo()`` and others of rl.algorithms.losses make
    some."""

    corrections: tuple[Correction.Config, ...] = ()
    """Weights for tokens that were not drawn from the weights they train; their product counts.
    They need the trainer's own log-probs, so that proximal is ``recomputed`` with any."""

    proximal: Literal["behaviour", "recomputed"] = "behaviour"
    """Log-probs in the denominator of the loss's importance ratio.

    - ``behaviour``: those of the generators, which drew the tokens.
    - ``recomputed``: those of the trainer before the step's first update, one forward pass more.
      This is not decoupled PPO (arXiv:2110.00641, arXiv:2505.24298), which also weighs each token
      by the ratio of the trainer's probability to the generator's.
      ``corrections=(TruncatedIS.Config(),)`` adds that weight, capped.
    """

    reward_kl_coef: Annotated[float, at_least(0, 1e6)] = 0.0
    """Penalty in each token's reward: this times the divergence from the reference policy. Or set
    loss.kl_coef."""

    reward_kl_estimator: Estimator = "k1"
    """How that divergence is estimated."""

    adaptive_kl: AdaptiveKL.Config = field(default_factory=AdaptiveKL.Config)
    """Steers whichever of these coefficients is above 0."""

    overlong_buffer: Annotated[int, at_least(0, 10**8)] = 0
    """Tokens before rollout.max_tokens over which a completion's reward falls by up to 1 (DAPO,
    arXiv:2503.14476, section 3.4); 0 for none."""

    update_epochs: Annotated[int, at_least(1, 10**4)] = 1
    """How often a step's rollouts are gone through."""

    prompts_per_minibatch: Annotated[int, at_least(0, 10**6)] = 0
    """Prompts per optimizer step, by whose samples' number the rollouts of a step are cut, in an
    order that seed, step and epoch give; 0 for all of a step's."""

    @property
    def kl_coef(self) -> float:
        """Of the penalty, in loss or reward."""
        return self.loss.kl_coef or self.reward_kl_coef

    @property
    def recomputes(self) -> bool:
        """Whether a step begins with the trainer's log-probs of its rollouts."""
        return self.proximal == "recomputed" or bool(self.corrections)

    @property
    def proximal_column(self) -> str:
        """Where the batch has what the importance ratio is against."""
        return "proximal_logprobs" if self.recomputes else "behaviour_logprobs"


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """The policy that a KL penalty holds on to: a mesh of its own, there where any coefficient is
    above 0. It has the trainer's config but for what stands here.
    """

    parallelism: ParallelismConfig = field(default_factory=one_rank)
    """Any; its ranks are the product of the degrees."""

    refresh_every: Annotated[int, at_least(0), NUMERICS] = 0
    """Steps after which it becomes what the policy is then; 0 for never."""


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """What expects a value before each token: a mesh of its own, there where algorithm.advantage
    needs values. The policy's trunk with a head of one number; it has the trainer's config but for
    what stands here.
    """

    parallelism: ParallelismConfig = field(default_factory=one_rank)
    """Any; its ranks are the product of the degrees."""

    optimizer: Annotated[OptimizersContainer.Config, NUMERICS] = field(
        default_factory=lambda: default_adamw(lr=1e-5)
    )
    lr_scheduler: Annotated[LRSchedulersContainer.Config, NUMERICS] = field(
        default_factory=lambda: LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    )

    loss: Annotated[ValueLoss.Config, NUMERICS] = field(default_factory=ValueLoss.Config)
    """Of a token's value. Tokens weigh as in algorithm.loss."""


@dataclass(kw_only=True, slots=True)
class RoleConfig:
    """A frozen model beside the policy, a mesh of its own: a teacher, a reward model, or what a
    loss of yours needs. It has the trainer's config but for what stands here.
    """

    model: ModelConfig
    """Of the policy's vocabulary; its weights are those of ``hf_path`` or, always where it gives
    values, of ``checkpoint``."""

    parallelism: ParallelismConfig = field(default_factory=one_rank)
    """Any; its ranks are the product of the degrees."""

    checkpoint: str | None = None
    """A step's folder among the checkpoints of a run's trainer or critic."""

    head: Head = "logprobs"
    """Whether it gives log-probs of the policy's tokens, or values as a critic does."""

    column: str = ""
    """Under which name the loss sees these, as ``teacher_logprobs``; empty where it does not."""

    reward_weight: Annotated[float, SIGNED] = 0.0
    """For a reward model, which is one with values: this times its value of the whole completion is
    added to the task's reward before advantages are computed."""


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out prompts, after training and on the way."""

    every: Annotated[int, at_least(0)] = 0
    """Steps between evaluations on the way, which run behind training; 0 for none. They go to
    evaluations.jsonl."""

    prompts: Annotated[int, at_least(0, 10**7)] = 256
    """How many, 0 for no evaluation; fewer where the task holds out fewer. A task that holds out
    none is refused."""

    samples: Annotated[int, at_least(0, 10**5)] = 4
    """k of pass@k: completions per prompt at the rollouts' temperature. 0 for greedy alone."""


@dataclass(kw_only=True, slots=True)
class DeadlineConfig:
    """How long anything is waited for, in seconds, before the run fails and says what was
    silent.
    """

    start: Annotated[float, SECONDS] = 600.0
    """For a mesh to start, imports and model included."""

    call: Annotated[float, SECONDS] = 600.0
    """For any call to an actor, such as generating a step's completions."""

    heartbeat: Annotated[float, at_least(0, YEAR_S)] = 60.0
    """For any sign of life of a rank; one that gives none is treated as dead. 0 asks for none."""

    push: Annotated[float, SECONDS] = 60.0
    """For a policy version to reach the generators, on top of the time of its bytes at
    weights.min_gb_s."""

    reward: Annotated[float, SECONDS, NUMERICS] = 60.0
    """For the rewards of one group."""


Action = Literal["ignore", "warn", "fail"]
"""What becomes of an alarm: it is counted in any case, a warning is shown, a failure ends the
run."""


@dataclass(kw_only=True, slots=True)
class WatchdogConfig:
    """What is watched, from which value on it is an alarm, and what becomes of it.

    Every alarm is counted in the metrics, as ``watchdog/NAME``.
    """

    stalled: Action = "fail"
    stalled_s: Annotated[float, SECONDS] = 1800.0
    """Seconds without a finished step, not counting evaluations."""

    zero_std: Action = "warn"
    zero_std_steps: Annotated[int, at_least(1)] = 10
    """Steps in a row in which no group had an advantage."""

    starving: Action = "warn"
    starving_share: Annotated[float, between(0, 1)] = 0.9
    """Share of a step above which the trainer waits for rollouts, starving_steps in a row; only
    with max_staleness."""
    starving_steps: Annotated[int, at_least(1)] = 10

    entropy: Action = "warn"
    entropy_min: Annotated[float, at_least(0, 1000)] = 0.0
    """Mean entropy of a token, in nats, below which the policy has collapsed; 0 for none."""
    entropy_max: Annotated[float, at_least(0, 1000)] = 0.0
    """Above which it has dissolved; 0 for none."""

    drift: Action = "warn"
    drift_max: Annotated[float, at_least(0, 1e6)] = 0.0
    """``kl/behaviour``, in nats per token, above which trainer and generators disagree; 0 for
    none."""

    non_finite: Action = "warn"
    """A metric that is not finite. An update whose gradient norm is not finite is skipped in any
    case, and more than trainer.max_skipped_steps in a row end the run."""


@dataclass(kw_only=True, slots=True)
class RLConfig:
    """One training run."""

    task: Annotated[Task.Config, NUMERICS]
    """What to train on: the config of a Task."""

    model: Annotated[ModelConfig, NUMERICS] = field(default_factory=ModelConfig)
    rollout: Annotated[RolloutConfig, NUMERICS] = field(default_factory=RolloutConfig)
    algorithm: Annotated[AlgorithmConfig, NUMERICS] = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    roles: Annotated[dict[str, RoleConfig], NUMERICS] = field(default_factory=dict)
    """Other models, by names of your own."""

    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weights: WeightPushConfig = field(default_factory=WeightPushConfig)
    evaluation: Annotated[EvaluationConfig, COSMETIC] = field(default_factory=EvaluationConfig)
    deadlines: Annotated[DeadlineConfig, COSMETIC] = field(default_factory=DeadlineConfig)
    watchdog: Annotated[WatchdogConfig, COSMETIC] = field(default_factory=WatchdogConfig)
    hardware: Annotated[HardwareConfig, PERFORMANCE] = field(default_factory=HardwareConfig)
    slurm: Annotated[SlurmConfig, PERFORMANCE] = field(default_factory=SlurmConfig)
    kubernetes: Annotated[KubernetesConfig, PERFORMANCE] = field(default_factory=KubernetesConfig)

    colocate: Annotated[Literal["none", "models", "all"], PERFORMANCE] = "none"
    """Which meshes share devices: one at a time has memory there, the others wait in the host's.

    - ``none``: each has devices of its own, where there are enough.
    - ``models``: trainer, reference, critic and roles share theirs.
    - ``all``: the generators too, which forget keys and values meanwhile. Only in lockstep.
    """

    max_restarts: Annotated[int, at_least(0, 10**6), COSMETIC] = 3
    """Times that a dead mesh, trainer or generator, is started again without progress in between;
    one more ends the run. Progress is a new checkpoint of the trainer's, a completion of the
    generator's."""

    steps: Annotated[int, at_least(1), NUMERICS] = 100
    """Steps, each on rollout.prompts_per_step prompts: one optimizer step, or as many as
    algorithm.update_epochs and algorithm.prompts_per_minibatch make of it."""

    seed: Annotated[int, at_least(0, 2**63 - 1), NUMERICS] = 0
    """Of the initial weights, the order of prompts and every completion."""

    output_dir: Annotated[str, COSMETIC] = ""
    """The run folder; empty for runs/NAME-TIME."""

    resume: Annotated[bool, COSMETIC] = False
    """Go on from the newest complete checkpoint in output_dir."""

    quiet: Annotated[bool, COSMETIC] = False
    """Print nothing but errors."""

    @property
    def nodes(self) -> int:
        """That the run needs, all its meshes together."""
        return self.trainer.nodes + self.generator.nodes

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of each step."""
        prompts = self.rollout.prompts_per_step
        algorithm = self.algorithm
        return algorithm.update_epochs * (prompts // (algorithm.prompts_per_minibatch or prompts))
