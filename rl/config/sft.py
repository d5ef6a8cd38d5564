"""SFTConfig: all that a run of the supervised trainer depends on."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from rl.algorithms.losses import CrossEntropyLoss, PolicyLoss
from rl.config.dataset import DatasetConfig, DatasetRunConfig
from rl.data.conversations import ConversationsConfig
from rl.rules import NUMERICS


@dataclass(kw_only=True, slots=True)
class SFTDataConfig(ConversationsConfig, DatasetConfig):
    """Examples of a run of the supervised trainer. A line of a file has ``messages``, ``prompt``
    and ``completion``, or ``text``.
    """


@dataclass(kw_only=True, slots=True)
class SFTConfig(DatasetRunConfig):
    """Config of a run that trains a model on given conversations or texts."""

    trainer_class: ClassVar[str] = "rl.trainers.sft:SFTTrainer"

    task: Annotated[SFTDataConfig, NUMERICS] = field(default_factory=SFTDataConfig)
    loss: Annotated[PolicyLoss.Config, NUMERICS] = field(default_factory=CrossEntropyLoss.Config)
    """Cost of a trained token. Only losses of log-probs and entropy apply."""
