"""Fields that the configs of trainers on given examples share."""

from dataclasses import dataclass
from typing import Annotated

from rl.config.run import RunConfig
from rl.data.sources import HeldOutConfig
from rl.types.rules import COSMETIC, NUMERICS, SHARE, at_least


@dataclass(kw_only=True)  # without slots, which only one base of a class may have
class DatasetConfig(HeldOutConfig):
    """Examples to train on, and validation examples."""

    held_out_fraction: Annotated[float, SHARE] = 0.05
    """Share of the examples of ``path`` that are held out for validation, chosen by a hash of their
    prompts, so that examples of one prompt are held out together. 0 for no validation."""


@dataclass(kw_only=True, slots=True)
class DatasetRunConfig(RunConfig):
    """Config of a run that trains on given examples."""

    examples_per_step: Annotated[int, at_least(1, 10**6), NUMERICS] = 32
    """Number of examples in the batch of a step."""

    epochs: Annotated[int, at_least(0, 10**6), NUMERICS] = 0
    """Number of passes over the examples. 0: ``steps`` sets the length of the run."""

    validate_every: Annotated[int, at_least(0), COSMETIC] = 0
    """Number of steps between validations during training; 0 for one at the end only."""

    validate_at_start: Annotated[bool, COSMETIC] = False
    """Whether to validate the initial weights before the first step too. The results are those of
    step 0."""

    @property
    def sequences(self) -> int:
        """Number of sequences that a step trains on."""
        return self.examples_per_step

    @property
    def optimizer_steps(self) -> int | None:
        """Number of optimizer steps of the run; None if it follows from the data."""
        return None if self.epochs else self.steps

    def unused(self) -> dict[str, str]:
        """Return the fields that concern rollouts, and those of generators if there are none."""
        names = (
            *("zero_std", "zero_std_steps", "starving", "starving_share", "starving_steps"),
            *("parity", "mismatch", "mismatch_max", "reference", "drift", "drift_max"),
        )
        fix = "the run has no rollouts; set watchdog.non_finite or watchdog.stalled"
        fixes = {f"watchdog.{name}": fix for name in names}
        fixes["trainer.router_replay"] = "given examples have no recorded experts"
        if self.sampling_run() is None:
            fix = "the run has no generators; set deadlines.call"
            fixes |= {"deadlines.push": fix, "deadlines.reward": fix}
        return fixes
