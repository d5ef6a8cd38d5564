"""Account of every prompt of the run, and of the age of the weights that answer it."""

from collections import Counter, deque
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from rl.errors import RunError
from rl.types import Rollout

Group = list[Rollout]
"""Scored rollouts of one prompt."""


@dataclass(slots=True)
class _Entry:
    prompt_id: int
    due: int
    group: Group | None = None


class Ledger:
    """Every prompt_id handed out is in one place: submitted = waiting + running + finished +
    trained + dropped. ::

        ledger = Ledger(groups_per_step=32, max_staleness=2)
        if ledger.admits(held):                     # generators hold version ``held`` or newer
            prompt_id = ledger.admit(held)            # running
        ledger.finish(prompt_id, group)               # finished; or drop(prompt_id, reason)
        groups = ledger.take(32)                    # trained on next; [] if that broke the bound
        ledger.stepped(trainer.version)             # trained

    **The bound.** A step makes U = ``updates_per_step`` versions of one. No token's step begins at
    a version more than S = ``max_staleness`` * U above the one it was drawn from. An entry is *due*
    at version ``held + S``, the last at which it may be trained, since no token of it is drawn from
    less than ``held``. The batch in the making is trained from version t on, and lacks ``room`` of
    its B groups. Were all entries trained in order, the one at place p would have its *turn* at
    version t if p < room, else at t + U + U * ((p - room) // B). Invariant: no entry's turn comes
    after it is due.

    - ``admit`` checks it for the place at the end, and changes no other.
    - An entry that leaves moves those behind it forward: their turns come no later.
    - ``take`` fills one of the room: for those behind, place and room shrink alike, and the turn
      stays. Those before it are passed over, and it is taken only if the turn of each still comes
      in time.
    - A step finds no room left, and makes t + U of t and B of room: turns stay. Where it skips
      updates t grows less, and turns come earlier.

    An entry that is taken has its turn at t, so t <= due: the bound holds. So a long rollout holds
    up no step for as long as there is other work that its own bound leaves time for; with nothing
    to spare, the order is first in, first out.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int, updates_per_step: int = 1):
        self._size = groups_per_step
        self._updates = updates_per_step
        self._staleness = max_staleness * updates_per_step
        self.submitted = self.trained = 0
        """Number of prompt_ids handed out, and number trained on."""
        self.dropped: Counter[str] = Counter()
        """Number of prompt_ids that will never be trained on, by reason."""
        self._entries: dict[int, _Entry] = {}
        self._waiting: deque[int] = deque()
        self.room = groups_per_step
        """Number of groups that the batch in the making still lacks."""
        self._version = 0
        self._taken: list[int] = []
        self._dropped_now: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """Number of running and finished prompt_ids, including the batch in the making."""
        return len(self._entries) + len(self._taken)

    def admits(self, held: int) -> bool:
        """Whether one more prompt may be sampled from version ``held`` or newer and still be
        trained on in time.
        """
        return self._next_turn() <= held + self._staleness

    def admit(self, held: int) -> int:
        """Return the next prompt_id, now running: one that has to be asked again, or a new one."""
        if self._waiting:
            prompt_id = self._waiting.popleft()
        else:
            prompt_id = self.submitted
            self.submitted = self.submitted + 1
        self._entries[prompt_id] = _Entry(prompt_id, held + self._staleness)
        return prompt_id

    def finish(self, prompt_id: int, group: Group) -> None:
        """Store the rollouts of a running prompt_id, which is finished now."""
        entry = self._entries[prompt_id]
        assert entry.group is None, f"prompt_id {prompt_id} finished twice"
        entry.group = group

    def drop(self, prompt_id: int, reason: str) -> None:
        """Drop a running prompt_id, which will never be trained on."""
        assert self._entries.pop(prompt_id).group is None, f"prompt_id {prompt_id} was finished"
        self.dropped[reason] += 1
        self._dropped_now.setdefault(reason, []).append(prompt_id)

    def take(self, count: int) -> list[Group]:
        """Return the ``count`` oldest finished groups, at most what the batch lacks, that make no
        other group late.

        Empty if fewer groups have finished.
        """
        count = min(count, self.room)
        chosen: list[_Entry] = []
        passed_over = least_room = 0
        for entry in self._entries.values():
            if len(chosen) == count:
                break
            if entry.group is None:
                least_room = max(
                    least_room,
                    passed_over + 1 - self._size * ((entry.due - self._version) // self._updates),
                )
                passed_over += 1
            elif self.room - len(chosen) > least_room:
                chosen.append(entry)
            else:
                return []
        if len(chosen) < count:
            return []
        for entry in chosen:
            del self._entries[entry.prompt_id]
            self._taken.append(entry.prompt_id)
        self.room -= count
        return [entry.group for entry in chosen if entry.group is not None]

    def stepped(self, version: int) -> dict[str, Any]:
        """Record that the batch was trained and the trainer is at ``version``; return the row of
        the step for ``ledger.jsonl``.

        Raises RunError if the counts do not add up.
        """
        row = {"trained_now": self._taken, "dropped_now": self._dropped_now}
        self.trained += len(self._taken)
        self._taken = []
        self._dropped_now = {}
        self._version = version
        self.room = self._size
        counts = self.counts()
        if 2 * self.submitted != sum(counts.values()):
            raise RunError(f"the ledger does not add up: {counts}")
        return row | counts

    def counts(self) -> dict[str, int]:
        """Return the number of submitted prompts, and the number in each place."""
        finished = len(self.finished()) + len(self._taken)
        return {
            "submitted": self.submitted,
            "waiting": len(self._waiting),
            "running": len(self) - finished,
            "finished": finished,
            "trained": self.trained,
            "dropped": self.dropped.total(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the state without the groups of ``finished``, as JSON.

        Called between steps, when no batch is in the making.
        """
        assert not self._taken, "a batch is in the making"
        running = [entry.prompt_id for entry in self._entries.values() if entry.group is None]
        return {
            "submitted": self.submitted,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "dropped_now": deepcopy(self._dropped_now),
            "waiting": sorted([*self._waiting, *running]),
        }

    def finished(self) -> dict[int, Group]:
        """Return the groups that wait to be trained on, by prompt_id, oldest first: the other half
        of the state.
        """
        return {
            entry.prompt_id: entry.group
            for entry in self._entries.values()
            if entry.group is not None
        }

    def restore(
        self, state: dict[str, Any], finished: dict[int, Group], version: int, *, keep: bool = False
    ) -> None:
        """Go back to the state and the groups of the time when the trainer was at ``version``.

        Empty arguments are the start of the run.

        - Prompts that were running then are asked again, and so are groups that would break the
          bound, which may have changed.
        - Prompts submitted since then are forgotten. With ``keep`` they are asked again, except for
          groups that have finished since without a token above ``version``: these stay.
        """
        since = {
            prompt_id: group
            for prompt_id, group in self.finished().items()
            if keep and max(_versions(group)) <= version
        }
        finished = finished | since
        submitted = state.get("submitted", 0)
        self.submitted = max(submitted, self.submitted) if keep else submitted
        again = {*state.get("waiting", []), *finished, *range(submitted, self.submitted)}
        self.trained = state.get("trained", 0)
        self.dropped = Counter(state.get("dropped", {}))
        self._version = version
        self.room = self._size
        self._entries = {}
        self._taken = []
        self._dropped_now = deepcopy(state.get("dropped_now", {}))
        for prompt_id, group in finished.items():
            entry = _Entry(prompt_id, min(_versions(group)) + self._staleness, group)
            if self._next_turn() <= entry.due:
                self._entries[prompt_id] = entry
        self._waiting = deque(sorted(again - self._entries.keys()))

    def _next_turn(self) -> int:
        """Return the turn that one more entry would have."""
        behind = len(self._entries) - self.room
        steps = 0 if behind < 0 else 1 + behind // self._size
        return self._version + self._updates * steps


def _versions(group: Group) -> Iterable[int]:
    return (version for rollout in group for version in rollout.versions.tolist())
