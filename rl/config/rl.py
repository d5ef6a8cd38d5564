"""RLConfig: all that a run of the RL trainer depends on."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.config import ParallelismConfig

from rl.algorithms.losses import ValueLoss
from rl.config.algorithm import AlgorithmConfig, PolicyGradientConfig
from rl.config.rollout import RolloutRecordConfig
from rl.config.run import SamplingRunConfig
from rl.model.shape import ModelConfig
from rl.session.session_config import Role
from rl.training.trainer_config import TrainerConfig, one_rank
from rl.types import Head
from rl.types.rules import COSMETIC, NUMERICS, SIGNED, above, at_least

DECODING = 2.0
"""Time to sample a token, over that of a token in a trainer's forward pass, as measured on CPU."""


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
    not. If several models have the same column, it is the weighted mean of their outputs, so that
    :class:`rl.algorithms.losses.DistillationLoss` has the weighted mean of their divergences."""

    share: Annotated[float, above(0, 1e6)] = 1.0
    """Weight of the output among models with the same column."""

    tasks: tuple[str, ...] = ()
    """Tasks of a mixture whose rollouts the model computes the column for; empty for all."""

    reward_weight: Annotated[float, SIGNED] = 0.0
    """Weight of a reward model, whose head is ``values``. This times its score, the value at the
    last token of the completion, is added to the task's reward before advantages are computed."""


@dataclass(kw_only=True, slots=True)
class RLConfig(SamplingRunConfig):
    """Config of a run that trains a policy on its own rollouts."""

    trainer_class: ClassVar[str] = "rl.trainers.rl:RLTrainer"

    algorithm: Annotated[AlgorithmConfig, NUMERICS] = field(default_factory=PolicyGradientConfig)
    """Learning from the rollouts: the config of an Algorithm."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    roles: Annotated[dict[str, RoleConfig], NUMERICS] = field(default_factory=dict)
    """Additional frozen models, by names of your choice."""

    record: Annotated[RolloutRecordConfig, COSMETIC] = field(default_factory=RolloutRecordConfig)

    steps: Annotated[int, at_least(1), NUMERICS] = 100
    """Number of steps. Each trains on ``rollout.prompts_per_step`` prompts, in one optimizer step
    or in as many as follow from ``algorithm.update_epochs`` and
    ``algorithm.prompts_per_minibatch``."""

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps per step."""
        return self.algorithm.updates(self.rollout.prompts_per_step)

    def temperature(self, trained: int) -> float:
        """Return the temperature of the rollouts of the step after ``trained`` steps."""
        first = self.rollout.temperature
        last = self.rollout.final_temperature or first
        return first + (last - first) * trained / max(self.steps - 1, 1)

    @property
    def trainer_share(self) -> float | None:
        if self.rollout.max_staleness == 0:
            return None
        sampled = DECODING * self.rollout.max_tokens
        trained = (3 * self.algorithm.passes + len(self.algorithm.columns())) * self.longest
        return trained / (trained + sampled)

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
                router_replay="none",
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
            router_replay="none",
            checkpoint=checkpoint,
        )

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
