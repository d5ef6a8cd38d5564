"""What the controller must remember to go on exactly where it was."""

from dataclasses import asdict, dataclass, field
from typing import Any

from rl.types import Completion, Prompt, Rollout


@dataclass(slots=True)
class RunState:
    """Saved inside each checkpoint. Order follows ordinals, so two counters and what was sampled ahead say all."""

    step: int = 0
    """Steps completed."""

    next_ordinal: int = 0
    """First prompt that was not yet put to the policy."""

    ahead: list[list[Rollout]] = field(default_factory=list)
    """Groups sampled for the next step by weights older than the checkpoint's; empty in lockstep."""

    def forget_ahead(self) -> None:
        """Have the prompts of ``ahead`` put again."""
        self.next_ordinal -= len(self.ahead)
        self.ahead = []

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "RunState":
        """The state that ``to_dict`` gave; a fresh one from an empty dict."""
        ahead = [[_rollout(fields) for fields in group] for group in state.get("ahead", [])]
        return cls(**(state | {"ahead": ahead}))


def _rollout(fields: dict[str, Any]) -> Rollout:
    prompt, completion = Prompt(**fields["prompt"]), Completion(**fields["completion"])
    return Rollout(**(fields | {"prompt": prompt, "completion": completion}))
