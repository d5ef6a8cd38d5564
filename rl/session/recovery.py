"""Judgement of the loss of a rank: the meshes to start again."""

from collections import Counter

from rl.errors import ActorFailure, RankLost, RunError
from rl.observe.events import Events


class Recovery:
    """Decides which failures of meshes the session survives.

    - A mesh that lost a rank is started again, at most ``max_restarts`` times without progress in
      between.
    - An exception of an actor is final, since it would be raised again.
    """

    def __init__(self, max_restarts: int, events: Events):
        self.restarts = 0
        """Number of times that a mesh was started again."""
        self._max_restarts = max_restarts
        self._events = events
        self._in_a_row = Counter[str]()

    def survive(
        self, failure: ActorFailure, then: str, *, progressed: bool, generator: str = ""
    ) -> None:
        """Return if the mesh of ``failure`` is to be started again. ``then`` says what follows.
        ``progressed``: whether there was a completion of ``generator``, or without a name a
        checkpoint of the models, since its last loss.

        Raises ``failure`` otherwise; for a ``generator`` that was lost too often RunError, since no
        checkpoint mends that.
        """
        lost = self._in_a_row[generator] = 1 if progressed else self._in_a_row[generator] + 1
        if not isinstance(failure, RankLost):
            raise failure
        if lost > self._max_restarts:
            if not generator:
                raise failure
            often = f"it was lost {lost} times without a completion in between"
            raise RunError(f"{failure}\n{often}") from failure
        self.restarts += 1
        text = f"{str(failure).splitlines()[0]}; {then}"
        self._events.emit("lost", process=generator or failure.actor, text=text)
