"""Best checkpoints of a run by a metric of its evaluations, and the end of a run without better
ones.
"""

import json
import math
from collections.abc import Iterable, Mapping

from rl.config import BestConfig
from rl.errors import RunError
from rl.host.disk import write_whole
from rl.observe.checkpoint_folders import BEST, StepFolders


class Best:
    """Steps with the best values of ``config.metric`` so far; ``best.json`` beside each of
    ``checkpoints`` has them, so that none of their checkpoints is deleted.
    """

    def __init__(self, config: BestConfig, checkpoints: Iterable[StepFolders]):
        self._config = config
        self._checkpoints = [*checkpoints]
        self._sign = 1.0 if config.mode == "max" else -1.0
        self.values: dict[int, float] = {}
        """Value of each of the ``config.keep`` best steps, the best one first."""

    def resume_after(self, step: int) -> None:
        """Forget the steps after ``step``."""
        if self._config.metric:
            saved = self._checkpoints[0].best()
            self.values = {at: value for at, value in saved.items() if at <= step}
            self._write()

    def note(self, step: int, scores: Mapping[str, float]) -> None:
        """Take the evaluation of the weights after ``step`` into account, unless it is the start.

        Raises RunError if the evaluation has no such metric.
        """
        if not self._config.metric or step == 0 or not scores:
            return
        value = self._value(scores)
        if not math.isnan(value):
            ranked = sorted((self.values | {step: value}).items())  # the earlier one of equals
            ranked.sort(key=lambda item: -self._sign * item[1])
            self.values = dict(ranked[: self._config.keep])
            self._write()

    def stale_since(self, rows: Iterable[Mapping[str, float]]) -> int | None:
        """Return the step of the first of ``rows``, the evaluations in order, with which
        ``config.patience`` in a row are not better than one before them; None if there is none.
        """
        config = self._config
        best = -math.inf
        waited = 0
        for row in rows if config.metric and config.patience else ():
            value = self._sign * self._value(row)
            waited += 1
            if value > best + config.min_delta:
                best = value
                waited = 0
            if waited == config.patience:
                return int(row["step"])
        return None

    def facts(self) -> dict[str, float]:
        """Return step and value of the best checkpoint for the summary."""
        for step, value in self.values.items():
            return {"best_step": step, "best_value": value}
        return {}

    def _value(self, scores: Mapping[str, float]) -> float:
        name = self._config.metric
        if name not in scores:
            known = ", ".join(sorted({*scores} - {"step"}))
            raise RunError(f"best.metric is {name!r}; the evaluations have {known}")
        return scores[name]

    def _write(self) -> None:
        for store in self._checkpoints:
            store.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"metric": self._config.metric, "steps": self.values})
            write_whole(store.folder / BEST, lambda file: file.write(text.encode()))  # noqa: B023
