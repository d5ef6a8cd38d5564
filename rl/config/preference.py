"""PreferenceConfig: all that a run of the preference trainer depends on."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from torchtitan.config import ParallelismConfig

from rl.algorithms.sequence_losses import BradleyTerryLoss, DPOLoss, PairLoss, SequenceLoss
from rl.config.dataset import DatasetConfig, DatasetRunConfig
from rl.data.examples import EncodingConfig
from rl.session.session_config import Role
from rl.training.trainer_config import one_rank
from rl.types.rules import NUMERICS, PERFORMANCE


@dataclass(kw_only=True, slots=True)
class PreferenceDataConfig(EncodingConfig, DatasetConfig):
    """Examples of a run of the preference trainer. A line of a file has ``chosen`` and
    ``rejected``, or ``prompt``, ``completion`` and ``label`` for a loss of single examples.
    """


@dataclass(kw_only=True, slots=True)
class InitialPolicyConfig:
    """Frozen copy of the initial policy, on a mesh of its own; present if the loss compares with a
    reference. All other settings are those of the trainer.
    """

    parallelism: ParallelismConfig = field(default_factory=one_rank)
    """Parallelism degrees; the number of ranks is their product."""

    scores: Annotated[Literal["computed", "cached"], PERFORMANCE] = "computed"
    """Origin of the reference's log-probs of answers.

    - ``computed``: The reference runs during training and computes them in each step.
    - ``cached``: The reference runs before the first step and computes them once for each example,
      into ``reference/scores.safetensors`` of the run folder. No process of it runs during
      training. KTO needs them once for each step, since its baseline depends on the batch.
    """


@dataclass(kw_only=True, slots=True)
class PreferenceConfig(DatasetRunConfig):
    """Config of a run that trains a policy on preferred answers."""

    trainer_class: ClassVar[str] = "rl.trainers.preference:PreferenceTrainer"

    task: Annotated[PreferenceDataConfig, NUMERICS] = field(default_factory=PreferenceDataConfig)
    loss: Annotated[SequenceLoss.Config, NUMERICS] = field(default_factory=DPOLoss.Config)
    """Cost of a pair, or of a single example."""

    reference: InitialPolicyConfig = field(default_factory=InitialPolicyConfig)
    """Policy that the loss compares with."""

    @property
    def longest(self) -> int:
        """Maximum length of a sequence that is trained on, in tokens."""
        return self.task.max_tokens

    @property
    def sequences(self) -> int:
        """Number of sequences that a step trains on: of pairs, or answers and mismatched ones."""
        return 2 * self.examples_per_step

    @property
    def in_one_pass(self) -> bool:
        """Whether a step needs no forward pass of the policy besides that of the gradient: the loss
        is one of pairs, and a micro-batch has room for two sequences.
        """
        loss = type(self.loss.build())
        limits = self.trainer
        room = limits.micro_batch_tokens or limits.micro_batch_size * self.longest
        is_of_pairs = issubclass(loss, PairLoss) and loss.__call__ is PairLoss.__call__
        return is_of_pairs and room >= 2 * self.longest

    def models(self) -> dict[str, Role]:
        """Return the models by role, in the order in which they take devices."""
        loss = self.loss.build()
        models = {"trainer": Role("trainer", self.trainer, self.model, loss.head)}
        if loss.needs_reference:
            models["reference"] = self.reference_model(self.reference.parallelism)
        return models

    def unused(self) -> dict[str, str]:
        """Return the fields that concern rollouts or entropy, and a reference that is missing."""
        fix = "the loss has no entropy; set watchdog.non_finite or watchdog.stalled"
        names = ("entropy", "entropy_min", "entropy_max")
        fixes = DatasetRunConfig.unused(self) | {f"watchdog.{name}": fix for name in names}
        loss = self.loss.build()
        if not loss.needs_reference:
            name = type(loss).__name__
            fixes["reference"] = f"{name} compares with no reference; choose a loss that does"
        return fixes


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(PreferenceConfig):
    """Config of a run that trains a reward model on preferred answers."""

    loss: Annotated[SequenceLoss.Config, NUMERICS] = field(default_factory=BradleyTerryLoss.Config)
    """Cost of a pair."""
