"""How a run ends early, each way with its exit code, and what may fail without ending it."""

from typing import Literal

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_AGAIN = 75
EXIT_INTERRUPTED = 130


class ConfigError(ValueError):
    """The configuration or the input it names cannot work; raised before any process starts."""


class RunError(RuntimeError):
    """A run failed after it started; the message names the actor, rank and call."""


class ActorFailure(RunError):
    """A rank of a mesh died, gave no answer in time, or raised; the message says what it was doing."""

    def __init__(self, message: str, *, actor: str, rank: int, call: str, kind: Literal["died", "silent", "raised"]):
        super().__init__(message)
        self.actor, self.rank, self.call, self.kind = actor, rank, call, kind

    @property
    def is_lost(self) -> bool:
        """Whether the mesh has to be started again; what raised would raise again."""
        return self.kind != "raised"


class GroupLost(RunError):
    """The rollouts of one prompt cannot be had; the run can go on without them."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason
        """A few words that are counted: "reward raised"."""

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return GroupLost, (self.reason, str(self))  # from a process that scores
