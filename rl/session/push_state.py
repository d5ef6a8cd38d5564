"""The states of the weight push: which policy versions are begun, published and held."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Check = TypeVar("Check")


@dataclass(slots=True)
class PushState(Generic[Check]):
    """Policy versions that move from the trainer to the generators. ::

        begun >= published >= arrived

    - *begun*: the trainer has these weights and keeps them until they are published.
    - *published*: generators can read them.
    - *arrived*: every generator holds them, or newer ones.

    The transport keeps the last two published versions readable.

    - Weights never change under a reader. ``may_change`` holds if no version is left to publish and
      no comparison with the weights is left; ``begin`` follows each change.
    - With ``in_order``, generators load each version that is begun, and a restarted generator can
      read the version of the others. A publish waits until the previous version has arrived, so the
      two readable versions are at most the one that arrived and the one after it.
    - Without ``in_order``, a publish does not wait, and generators read the newest version.
    - With ``compares``, weights change only after each generator's copy was compared with them.
    """

    in_order: bool
    compares: bool
    begun: int = 0
    published: int = 0
    arrived: int = 0
    changing: bool = False
    """Whether the weights may change now, so that they must not be compared."""
    unchecked: deque[Check] = field(default_factory=deque)
    """Arrivals that wait for a comparison with the trainer's weights."""

    def restart(self, version: int) -> None:
        """Restart at ``version``, which is not published yet."""
        self.begun = self.published = self.arrived = version
        self.changing = False
        self.unchecked.clear()

    def begin(self, version: int) -> None:
        """Note that the trainer has ``version``, the previous one if an update was skipped."""
        self.begun = version
        self.changing = False

    @property
    def may_publish(self) -> bool:
        """Whether to publish a version now."""
        waits = self.in_order and self.arrived != self.published
        return self.begun != self.published and not waits

    @property
    def may_change(self) -> bool:
        """Whether nothing reads the trainer's weights, not even a comparison."""
        late = self.compares and self.arrived != self.begun
        return self.begun == self.published and not late and not self.unchecked

    @property
    def joins_at(self) -> int:
        """Version that a joining generator reads."""
        return self.arrived if self.in_order else self.published
