"""RLConfig: all that a run of the RL trainer depends on."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.config import ParallelismConfig

from rl.algorithms.algorithm import Algorithm
from rl.algorithms.losses import ValueLoss
from rl.algorithms.policy_gradient import PolicyGradient
from rl.config.run import RecordConfig, RunConfig
from rl.generation.config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.rules import (
    COSMETIC,
    NUMERICS,
    PERFORMANCE,
    SHARE,
    SIGNED,
    above,
    at_least,
)
from rl.session.config import Colocate, Role
from rl.tasks.base import Task
from rl.training.config import TrainerConfig, one_rank
from rl.types import MAX_TEMPERATURE, MIN_TEMPERATURE, Head
from rl.weights.transport import WeightPushConfig


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Sampling of the completions that each step trains on."""

    prompts_per_step: Annotated[int, at_least(1, 10**6)] = 32
    """Number of prompts whose completions a step trains on."""

    samples_per_prompt: Annotated[int, at_least(1, 10**5)] = 8
    """Number of completions per prompt. They form the group over which advantages are compared. 1
    requires an ``algorithm.advantage`` that compares no group, such as GAE."""

    max_tokens: Annotated[int, at_least(1, 10**8)] = 256
    """Maximum length of a completion, in tokens."""

    temperature: Annotated[float, at_least(MIN_TEMPERATURE, MAX_TEMPERATURE)] = 1.0
    """Sampling temperature. The log-probs of generator and trainer are both those of the
    distribution at this temperature."""

    top_p: Annotated[float, above(0, 1)] = 1.0
    """Threshold of nucleus sampling: the smallest set of the most likely tokens whose probabilities
    add up to this value is sampled from; 1 for all. If this, ``top_k`` or ``min_p`` cuts the
    vocabulary, each token is recorded with the set that it was sampled from, its sampling mask.
    Log-probs and entropies of every policy are then over this set. A mask takes 4 bytes for each
    token of the set, and at most an eighth of a byte for each token of the vocabulary."""

    top_k: Annotated[int, at_least(0)] = 0
    """Number of most likely tokens to sample from; 0 for all."""

    min_p: Annotated[float, SHARE] = 0.0
    """Probability, as a share of that of the most likely token, that a token must have to be
    sampled; 0 for all tokens."""

    max_staleness: Annotated[int, at_least(0, 10**4)] = 0
    """Maximum number of steps by which the weights that drew a token may be older than the weights
    at the start of the step that trains on it. 0 is lockstep: a batch is generated, then trained
    on. Above 0, generation, scoring, training and the weight push overlap."""

    pipeline: Literal["deterministic", "asynchronous"] = "deterministic"
    """Rule for which weights draw a token.

    - ``deterministic``: The config decides. Batch k comes from exactly the weights of step k -
      max_staleness, in the order of the prompts. The numbers are the same in every run and after
      every restart.
    - ``asynchronous``: Timing decides. Weights change while requests are in flight, and groups are
      trained on in the order in which they finish. Long groups may be passed over for as long as
      ``max_staleness`` allows.
    """

    stream_chunks: Annotated[int, at_least(1, 10**6), PERFORMANCE] = 1
    """Number of chunks that a step's groups are split into. Each chunk is trained on as soon as its
    groups have finished; the gradient is the same. More than 1 requires the asynchronous
    pipeline."""

    max_resampled_groups: Annotated[int, at_least(0, 10**6)] = 0
    """Maximum number of groups per step that are set aside because all their rewards are equal, and
    replaced by the next prompts (dynamic sampling of DAPO, arXiv:2503.14476, section 3.2). The
    reward includes the penalty of ``overlong_buffer`` and the scores of reward models, which are
    equal for equal answers alone."""

    reward_workers: Annotated[int, at_least(0, 10**4), PERFORMANCE] = 1
    """Number of processes that score completions. Processes that a reward starts end with its
    worker. 0 scores in the controller's process, where a reward that hangs or crashes ends the run
    and the processes that it starts are not ended."""

    max_lost: Annotated[float, SHARE, COSMETIC] = 0.1
    """Maximum share of groups that may be lost because their reward raised an error, hung or
    returned an invalid value. It is measured over the last 100 groups, or over one step's groups if
    they are more. A group that goes on by ``min_episodes`` counts by its share of lost episodes.
    Above it the run fails."""

    min_episodes: Annotated[int, at_least(0, 10**5)] = 0
    """Number of episodes with which a group is trained on although others of it were lost: their
    environment failed. ``ledger.jsonl`` counts the episodes that are missing. 0 drops each group
    that lost one. Requires an environment as the task."""


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """Frozen policy of a KL penalty, on a mesh of its own; present if a KL coefficient is above 0.
    All other settings are those of the trainer.
    """

    parallelism: ParallelismConfig = field(default_factory=one_rank)
    """Parallelism degrees; the number of ranks is their product."""

    refresh_every: Annotated[int, at_least(0), NUMERICS] = 0
    """Number of steps after which the reference becomes a copy of the current policy; 0 for
    never."""


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """Model that estimates values, on a mesh of its own; present if ``algorithm.advantage`` needs
    values. It is the policy's trunk with a value head. All other settings are those of the
    trainer.
    """

    checkpoint: Annotated[str | None, NUMERICS] = None
    """Folder that the critic starts from: of one step among the checkpoints of a reward model's
    trainer or of a critic, or a Hugging Face folder of a reward model. None: The trunk starts from
    ``model``, and all values are 0."""

    parallelism: ParallelismConfig = field(default_factory=one_rank)
    """Parallelism degrees; the number of ranks is their product."""

    optimizer: Annotated[OptimizersContainer.Config, NUMERICS] = field(
        default_factory=lambda: default_adamw(lr=1e-5)
    )
    """Optimizer of the critic."""

    lr_scheduler: Annotated[LRSchedulersContainer.Config, NUMERICS] = field(
        default_factory=lambda: LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    )
    """Learning rate schedule of the critic."""

    loss: Annotated[ValueLoss.Config, NUMERICS] = field(default_factory=ValueLoss.Config)
    """Loss of a token's value. Tokens are weighted as in ``algorithm.loss``."""


@dataclass(kw_only=True, slots=True)
class RoleConfig:
    """Frozen model next to the policy, on a mesh of its own: a teacher, a reward model or an input
    of a custom loss. All other settings are those of the trainer.
    """

    model: ModelConfig
    """Model with the policy's vocabulary. Its weights are those of ``checkpoint``, or of
    ``model.hf_path`` if ``checkpoint`` is not set."""

    parallelism: ParallelismConfig = field(default_factory=one_rank)
    """Parallelism degrees; the number of ranks is their product."""

    checkpoint: str | None = None
    """Folder of one step among the checkpoints of a run's trainer or critic, or a Hugging Face
    folder."""

    head: Head = "logprobs"
    """Output of the model: log-probs of the policy's tokens, or values like a critic or a reward
    model."""

    column: str = ""
    """Name under which the loss receives the output, such as ``teacher_logprobs``; empty if it does
    not."""

    reward_weight: Annotated[float, SIGNED] = 0.0
    """Weight of a reward model, whose head is ``values``. This times its score, the value at the
    last token of the completion, is added to the task's reward before advantages are computed."""


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Evaluation on held-out prompts, after training and during it."""

    every: Annotated[int, at_least(0)] = 0
    """Number of steps between evaluations during training; 0 for none. They run while training
    continues, and their results are written to ``evaluations.jsonl``."""

    at_start: bool = False
    """Whether to evaluate the initial weights before the first step too. The results are those of
    step 0."""

    prompts: Annotated[int, at_least(0, 10**7)] = 256
    """Number of held-out prompts; 0 disables evaluation. Fewer are used if the task holds out
    fewer. A task that holds out none is refused."""

    samples: Annotated[int, at_least(0, 10**5)] = 4
    """Number of completions per prompt at the rollouts' temperature, the k of pass@k. 0 for greedy
    decoding only."""


@dataclass(kw_only=True, slots=True)
class RolloutRecordConfig(RecordConfig):
    """Parts of each step that the run folder keeps, beside its metrics."""

    rollouts: Literal["all", "sample", "none"] = "all"
    """Rollouts of each step that are written to ``rollouts/step-N.parquet``, with all tokens.
    ``python -m rl.replay`` requires ``all``. Unless it is ``none``, all rollouts of evaluations are
    written to ``evaluations/step-N.parquet``."""

    sample: Annotated[int, at_least(1)] = 8
    """Number of rollouts of a step that ``sample`` keeps."""

    max_gib: Annotated[float, above(0)] = 10.0
    """Disk space for rollouts of steps and evaluations, in GiB. Above it, the files of the oldest
    steps are deleted."""

    @property
    def max_bytes(self) -> float:
        """``max_gib`` in bytes."""
        return self.max_gib * 2**30


@dataclass(kw_only=True, slots=True)
class RLConfig(RunConfig):
    """Config of a run that trains a policy on its own rollouts."""

    trainer_class: ClassVar[str] = "rl.trainers.rl:RLTrainer"

    task: Annotated[Task.Config, NUMERICS]
    """Prompts and reward to train on: the config of a Task."""

    rollout: Annotated[RolloutConfig, NUMERICS] = field(default_factory=RolloutConfig)
    algorithm: Annotated[Algorithm.Config, NUMERICS] = field(default_factory=PolicyGradient.Config)
    """Learning from the rollouts: the config of an Algorithm."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    roles: Annotated[dict[str, RoleConfig], NUMERICS] = field(default_factory=dict)
    """Additional frozen models, by names of your choice."""

    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weights: WeightPushConfig = field(default_factory=WeightPushConfig)
    evaluation: Annotated[EvaluationConfig, COSMETIC] = field(default_factory=EvaluationConfig)
    record: Annotated[RolloutRecordConfig, COSMETIC] = field(default_factory=RolloutRecordConfig)

    colocate: Annotated[Colocate, PERFORMANCE] = "none"
    """Meshes that share devices. One of them at a time has its state in device memory; the others
    wait in host memory.

    - ``none``: Each mesh has its own devices.
    - ``models``: Trainer, reference, critic and roles share devices.
    - ``all``: The generators share them too, and discard their KV cache in between. Requires
      lockstep.
    """

    steps: Annotated[int, at_least(1), NUMERICS] = 100
    """Number of steps. Each trains on ``rollout.prompts_per_step`` prompts, in one optimizer step
    or in as many as follow from ``algorithm.update_epochs`` and
    ``algorithm.prompts_per_minibatch``."""

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps per step."""
        return self.algorithm.updates(self.rollout.prompts_per_step)

    @property
    def longest(self) -> int:
        """Maximum length of a sequence that is trained on, in tokens."""
        return self.task.longest_sequence(self.rollout.max_tokens)

    @property
    def sequences(self) -> int:
        """Number of sequences that a step trains on."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    def models(self) -> dict[str, Role]:
        """Return the models by role, in the order in which they take devices."""
        models = {"trainer": Role("trainer", self.trainer, self.model)}
        needed = self.algorithm.roles()
        if "reference" in needed:
            models["reference"] = self.reference_model(self.reference.parallelism)
        if "critic" in needed:
            models["critic"] = Role("critic", self._critic_trainer(), self.model, "values")
        for name, role in self.roles.items():
            checkpoint = _starting_from(role.checkpoint, self.trainer.checkpoint)
            trainer = replace(
                self.trainer,
                parallelism=role.parallelism,
                checkpoint=replace(checkpoint, folder=name, enable=False),
                lora=None,
            )
            models[name] = Role(f"roles.{name}", trainer, role.model, role.head)
        return models

    def _critic_trainer(self) -> TrainerConfig:
        """Return the trainer's config with the critic's own fields in place of the trainer's."""
        keep = self.trainer.checkpoint.keep_latest_k
        checkpoint = replace(
            _starting_from(self.critic.checkpoint, self.trainer.checkpoint),
            folder="critic",
            # the critic's checkpoint must be complete before the trainer's: the run resumes at that
            async_mode="disabled",
            keep_latest_k=keep + 1 if keep else 0,  # plus that saved before the trainer's
        )
        return replace(
            self.trainer,
            parallelism=self.critic.parallelism,
            optimizer=self.critic.optimizer,
            lr_scheduler=self.critic.lr_scheduler,
            lora=None,  # with a frozen trunk, only the head would learn
            checkpoint=checkpoint,
        )

    def sampling_run(self) -> "RLConfig":
        """Return this config."""
        return self

    def generation(self) -> dict[str, Any]:
        """Return the fields of the session that concern generators."""
        return {
            "generator": self.generator,
            "weights": self.weights,
            "colocate": self.colocate,
            "reward_workers": self.rollout.reward_workers,
            "pushes": "in_order" if self.rollout.pipeline == "deterministic" else "newest",
            "compares_all": self.rollout.max_staleness <= 1,
            "longest": self.longest,
        }

    def unused(self) -> dict[str, str]:
        """Return the sections of models that the algorithm does not have."""
        fixes = {
            "reference": "the algorithm has no reference; set algorithm.loss.kl_coef above 0",
            "critic": "the algorithm has no critic; choose an algorithm.advantage with values",
        }
        needed = self.algorithm.roles()
        return {name: fix for name, fix in fixes.items() if name not in needed}


def _starting_from(
    folder: str | None, config: CheckpointManager.Config
) -> CheckpointManager.Config:
    """Return ``config`` with initial weights from ``folder``, a checkpoint or a Hugging Face
    folder. None selects the weights of the model.
    """
    path = Path(folder).resolve() if folder else None
    return replace(
        config,
        initial_load_path=str(path) if path is not None else None,
        initial_load_model_only=path is not None,
        initial_load_in_hf=path is not None and (path / "config.json").is_file(),
    )
