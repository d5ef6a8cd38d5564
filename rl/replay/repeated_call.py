"""Call that ended a run, made again without the rest of the run."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl.config import RLConfig
from rl.errors import GroupLost, require
from rl.host.disk import TemporaryFolder
from rl.observe.rollout_files import RolloutFolder, read_rollouts
from rl.session.task_rollouters import score_alone
from rl.trainers.endings import facts_of
from rl.types import Completion

COMPARED = ("type", "error", "actor", "rank", "call", "place")
"""Facts of an error that are compared with the recorded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCall:
    """Call that was made again after a failure."""

    call: str
    """Name of the call, such as "step 3"."""
    recorded: dict[str, Any]
    """Facts of the recorded error."""
    error: dict[str, Any] = field(default_factory=dict)
    """Facts of the error of the new call; empty if it did not fail."""

    @property
    def differing(self) -> list[str]:
        """Names of the facts in which the two errors differ."""
        return [name for name in COMPARED if self.recorded.get(name) != self.error.get(name)]

    @property
    def report(self) -> str:
        """Text that says whether the call failed again, and with which error."""
        if not self.error:
            return f"{self.call} does not fail again"
        if not self.differing:
            return f"{self.call} fails again, with the same error:\n{_shown(self.error)}"
        return (
            f"{self.call} fails again, with another {' and '.join(self.differing)}:\n"
            f"{_shown(self.error)}\nrecorded was:\n{_shown(self.recorded)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, as JSON."""
        differing = self.differing if self.error else []
        both = {"error": self.error, "recorded": self.recorded, "differing": differing}
        return {"call": self.call, "failed": bool(self.error), **both}


def _shown(facts: dict[str, Any]) -> str:
    return f"{facts['error']}\nat {facts['place']}"


def read_failure(run: Path) -> dict[str, Any]:
    """Return the content of ``failure.json`` of the run in ``run``.

    Raises ConfigError, which says what can be done, if no failure is recorded or its call cannot be
    made again.
    """
    path = run / "failure.json"
    require(
        path.exists(),
        f"--failed: {path} does not exist, so no failure is recorded; --step K trains a step again",
    )
    failure: dict[str, Any] = json.loads(path.read_text())
    advice = "".join(f"\n- {sentence}" for sentence in failure.get("advice", ()))
    require(
        bool(failure.get("again")),
        f"--failed: this call cannot be made again alone: {failure['error']}{advice}",
    )
    return failure


def score_again(config: RLConfig, run: Path, failure: dict[str, Any]) -> RepeatedCall:
    """Score the group whose reward failed again, in a process of its own, without models."""
    (chunk,) = read_rollouts(RolloutFolder(run / "rollouts").failed)
    prompt = chunk.rollouts[0].prompt
    error: dict[str, Any] = {}
    completions = list[Completion]()
    for rollout in chunk.rollouts:  # of one turn
        (sequence,) = rollout.sequences
        first = int(np.argmax(sequence.sampled)) if sequence.sampled.any() else len(sequence)
        completion = Completion(
            tokens=sequence.tokens[first:].tolist(),
            logprobs=sequence.logprobs[first:].tolist(),
            versions=sequence.versions[first:].tolist(),
            finish_reason="stop" if rollout.stop_reason == "stop" else "length",
        )
        completions.append(completion)
    with TemporaryFolder("tiller-replay-") as folder:
        scoring = score_alone(
            config.task,
            prompt,
            completions,
            model=config.model,
            seed=config.seed,
            deadlines=config.deadlines,
            folder=Path(folder),
        )
        try:
            asyncio.run(scoring)
        except GroupLost as lost:
            error = facts_of(lost)
    call = f"the reward of prompt {prompt.prompt_id}"
    return RepeatedCall(call=call, recorded=failure["lost_group"], error=error)
