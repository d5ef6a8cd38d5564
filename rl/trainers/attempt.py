"""Step that is being taken, and how its calls can be made again after a failure."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rl.errors import ActorFailure, AlarmRaised, GroupLost, NothingLearned
from rl.session.session import Session


@dataclass(frozen=True, slots=True)
class Again:
    """Call that ``python -m rl.replay RUN --failed`` can make again."""

    call: Literal["step", "reward", ""] = ""
    """``step``: those of a step. ``reward``: the reward of one group. Empty: none."""
    why_not: str = ""
    """Sentence that says why no call can be made again, and what can be done."""

    @classmethod
    def never(cls, error: BaseException, step: int, saved: int = 0) -> "Again":
        """Return why a call outside a step that ended with ``error`` after ``step`` cannot be
        made again. ``saved`` is the step of the newest checkpoint.
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


class Attempt:
    """Whether the calls of a step are being made, and the exception that ended them. ::

    with attempt.step():
        await session.forward_backward(batch, loss)
    """

    def __init__(self) -> None:
        self._is_open = False
        self._error: BaseException | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark the block as the calls of a step."""
        self._is_open = True
        try:
            yield
        except Exception as error:  # not a cancellation, which another component caused
            self._error = error
            raise
        self._is_open = False

    def ended_with(self, error: BaseException, session: Session) -> bool:
        """Whether ``error`` comes from the calls of the step.

        The loss of a model may cancel the block before its calls raise.
        """
        of_model = isinstance(error, ActorFailure) and session.has(error.actor)
        return self._is_open and (error is self._error or of_model)


def lost_group(error: BaseException | None) -> GroupLost | None:
    """Return the loss of a group that caused ``error``; None without one."""
    while error is not None and not isinstance(error, GroupLost):
        error = error.__cause__
    return error
