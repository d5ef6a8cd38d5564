"""Choice of prompts by their recent success."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from rl.config.rollout import CurriculumConfig
from rl.types import Rollout


class Curriculum:
    """Draws from the first ``config.prompts`` prompts of a task. Which one a prompt_id stands for
    depends on the seed, the prompt_id and the groups that were noted before.
    """

    def __init__(self, config: CurriculumConfig, seed: int):
        self._config = config
        self._seed = seed
        self._changed = 0
        """First prompt whose weight is not part of ``_sums`` yet."""
        self.restore([])

    def draw(self, prompt_id: int) -> int:
        """Return the place in the task's stream of the prompt that ``prompt_id`` stands for."""
        if not self._config.prompts:
            return prompt_id
        key = f"curriculum/{self._seed}/{prompt_id}".encode()
        share = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") / 2**64
        sums = self._sums
        count = len(sums)
        if (first := self._changed) < count:
            # the same additions, in the same order, as a sum of all weights
            rest = self._weights[first:].copy()
            rest[0] += sums[first - 1] if first else 0.0
            rest.cumsum(out=sums[first:])
            self._changed = count
        if sums[-1] == 0:  # all are skipped
            return min(int(share * count), count - 1)
        place = np.searchsorted(sums, share * sums[-1], side="right")
        if place == count:  # the product was rounded up
            place = self._weights.nonzero()[0][-1]
        return int(place)

    def note(self, place: int, group: Sequence[Rollout]) -> None:
        """Take the rollouts of the prompt at ``place`` into account."""
        rewarded = [rollout for rollout in group if not rollout.abstained]
        if not self._config.prompts or not rewarded:
            return
        share = sum(bool(rollout.metrics["correct"]) for rollout in rewarded) / len(rewarded)
        before = self._rates[place]
        memory = self._config.memory
        self._rates[place] = share if np.isnan(before) else memory * before + (1 - memory) * share
        self._solved[place] = self._solved[place] + 1 if share == 1 else 0
        self._unsolved[place] = self._unsolved[place] + 1 if share == 0 else 0
        self._weigh(slice(place, place + 1))

    def metrics(self) -> dict[str, float]:
        """Return the numbers of prompts that were asked, and of those that are not asked again."""
        if not self._config.prompts:
            return {}
        solved, unsolved = self._skipped(slice(None))
        return {
            "curriculum/seen": float(np.count_nonzero(~np.isnan(self._rates))),
            "curriculum/solved": float(np.count_nonzero(solved)),
            "curriculum/unsolved": float(np.count_nonzero(unsolved)),
        }

    def to_dict(self) -> list[Any]:
        """Return place, success and groups in a row of each prompt that was asked, as JSON."""
        seen = (~np.isnan(self._rates)).nonzero()[0]
        columns = (seen, *(values[seen] for values in (self._rates, self._solved, self._unsolved)))
        return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def restore(self, rows: list[Any]) -> None:
        """Go back to what ``to_dict`` returned; [] is the start."""
        count = self._config.prompts
        self._rates = np.full(count, np.nan)
        self._solved = np.zeros(count, dtype=np.int64)
        self._unsolved = np.zeros(count, dtype=np.int64)
        for place, *values in rows:
            if place < count:
                self._rates[place], self._solved[place], self._unsolved[place] = values
        self._weights = np.empty(count)
        self._sums = np.empty(count)
        self._weigh(slice(0, count))

    def _skipped(self, places: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return which prompts are not asked again, since they are solved or unsolved, bool [n]."""
        config = self._config
        limits = ((self._solved, config.skip_solved), (self._unsolved, config.skip_unsolved))
        solved, unsolved = ((counts[places] >= most) & (most > 0) for counts, most in limits)
        return solved, unsolved

    def _weigh(self, places: slice) -> None:
        """Compute the weights of prompts again."""
        rates = self._rates[places]
        if self._config.rule == "failure":
            weights, most = 1 - rates, 1.0
        else:
            weights, most = rates * (1 - rates), 0.25
        weights = np.where(np.isnan(rates), most, np.maximum(weights, self._config.floor * most))
        solved, unsolved = self._skipped(places)
        weights[solved | unsolved] = 0.0
        self._weights[places] = weights
        self._changed = min(self._changed, places.start)
