"""What the controller must remember to go on exactly where it was."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class RunState:
    """Saved inside each checkpoint. Order follows ordinals, so two counters say everything."""

    step: int = 0
    """Steps completed."""

    next_ordinal: int = 0
    """First prompt that was not yet put to the policy."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "RunState":
        """The state that ``to_dict`` gave; a fresh one from an empty dict."""
        return cls(**state)
