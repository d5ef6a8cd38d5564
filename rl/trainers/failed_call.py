"""Call that ended a run, and whether it can be made again alone."""

from dataclasses import dataclass
from typing import Literal

from rl.errors import ActorFailure, AlarmRaised, GroupLost, NothingLearned


@dataclass(frozen=True, slots=True)
class FailedCall:
    """Call that ended a run, for ``python -m rl.replay RUN --failed``."""

    call: Literal["step", "reward", ""] = ""
    """``step``: the calls of a step. ``reward``: the reward of one group. Empty: a call that cannot
    be made again alone."""
    why_not: str = ""
    """Sentence that says why the call cannot be made again, and what can be done."""

    @classmethod
    def outside_steps(cls, error: BaseException, step: int, saved: int = 0) -> "FailedCall":
        """Return the call that raised ``error`` after ``step``, outside the calls of a step.
        ``saved`` is the step of the newest checkpoint.
        """
        if isinstance(error, AlarmRaised | NothingLearned):
            why_not = "No call failed: a check of the metrics ended the run"
            last = f"; python -m rl.replay RUN --step {step} trains the last step again"
            return cls(why_not=f"{why_not}{last if step else ''}.")
        if lost_group(error) is not None:
            play = "--run RUN --prompt N runs one with the policy of the newest checkpoint"
            if not saved:
                play = "--config RUN/config.json --prompt N runs one with answers that you type"
            why_not = "An episode cannot be run again without a policy"
            return cls(why_not=f"{why_not}; python -m rl.play {play}.")
        if isinstance(error, ActorFailure):
            return cls(
                why_not=f"The call {error.call} of {error.actor} cannot be made again alone, since "
                "what it received is not kept; a resumed run makes it again."
            )
        return cls(
            why_not="The failing call is not one of a step, so it cannot be made again alone; a "
            "resumed run makes it again."
        )


def lost_group(error: BaseException | None) -> GroupLost | None:
    """Return the loss of a group that caused ``error``; None without one."""
    while error is not None and not isinstance(error, GroupLost):
        error = error.__cause__
    return error
