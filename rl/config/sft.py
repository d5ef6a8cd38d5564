"""SFTConfig: all that a run of the supervised trainer depends on."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from rl.algorithms.losses import CrossEntropyLoss, PolicyLoss
from rl.config.run import RunConfig
from rl.data.conversations import ConversationsConfig
from rl.rules import COSMETIC, NUMERICS, SHARE, at_least


@dataclass(kw_only=True, slots=True)
class SFTDataConfig(ConversationsConfig):
    """Examples to train on and to hold out."""

    path: str = ""
    """JSONL file. A line has ``messages``, ``prompt`` and ``completion``, or ``text``. Required
    unless the trainer is given rows."""

    held_out_path: str = ""
    """JSONL file of the validation examples. Empty: ``held_out_fraction`` of ``path``."""

    held_out_fraction: Annotated[float, SHARE] = 0.05
    """Share of the examples of ``path`` that are held out for validation, chosen by a hash of their
    tokens, so equal examples are held out together. 0 for no validation."""


@dataclass(kw_only=True, slots=True)
class SFTConfig(RunConfig):
    """Config of a run that trains a model on given conversations or texts."""

    trainer_class: ClassVar[str] = "rl.trainers.sft:SFTTrainer"

    task: Annotated[SFTDataConfig, NUMERICS] = field(default_factory=SFTDataConfig)
    loss: Annotated[PolicyLoss.Config, NUMERICS] = field(default_factory=CrossEntropyLoss.Config)
    """Cost of a trained token. Only losses of log-probs and entropy apply."""

    examples_per_step: Annotated[int, at_least(1, 10**6), NUMERICS] = 32
    """Number of examples in the batch of a step."""

    epochs: Annotated[int, at_least(0, 10**6), NUMERICS] = 0
    """Number of passes over the examples. 0: ``steps`` sets the length of the run."""

    validate_every: Annotated[int, at_least(0), COSMETIC] = 0
    """Number of steps between validations during training; 0 for one at the end only."""
