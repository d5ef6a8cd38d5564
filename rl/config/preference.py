"""PreferenceConfig: all that a run of the preference trainer depends on."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from rl.algorithms.sequence_losses import BradleyTerryLoss, DPOLoss, SequenceLoss
from rl.config.dataset import DatasetConfig, DatasetRunConfig
from rl.config.rl import ReferenceConfig
from rl.data.examples import EncodingConfig
from rl.rules import NUMERICS


@dataclass(kw_only=True, slots=True)
class PreferenceDataConfig(EncodingConfig, DatasetConfig):
    """Examples of a run of the preference trainer. A line of a file has ``chosen`` and
    ``rejected``, or ``prompt``, ``completion`` and ``label`` for a loss of single examples.
    """


@dataclass(kw_only=True, slots=True)
class PreferenceConfig(DatasetRunConfig):
    """Config of a run that trains a policy on preferred answers."""

    trainer_class: ClassVar[str] = "rl.trainers.preference:PreferenceTrainer"

    task: Annotated[PreferenceDataConfig, NUMERICS] = field(default_factory=PreferenceDataConfig)
    loss: Annotated[SequenceLoss.Config, NUMERICS] = field(default_factory=DPOLoss.Config)
    """Cost of a pair, or of a single example."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """Frozen copy of the initial policy; present if the loss compares with it."""


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(PreferenceConfig):
    """Config of a run that trains a reward model on preferred answers."""

    loss: Annotated[SequenceLoss.Config, NUMERICS] = field(default_factory=BradleyTerryLoss.Config)
    """Cost of a pair."""
