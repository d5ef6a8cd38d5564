"""One step of an algorithm, chunk by chunk."""

from collections.abc import Sequence

import numpy as np
import torch

from rl.metrics import Metrics
from rl.observe.rollouts import Chunk
from rl.session.session import Session
from rl.trainers.algorithm import Algorithm
from rl.types import Batch, Rollout

FOUND = {"logprobs": "trainer_logprobs", "entropy": "entropy"}
"""Column by output of the trainer's gradient pass."""

RECORDED_ELSEWHERE = ("behaviour_logprobs", "versions", "staleness")
"""Columns of a batch that the sequences of its rollouts have, or that follow from them."""


class Step:
    """Step ``number`` of ``algorithm`` on the models of ``session``. ::

    step = Step(algorithm, session, number)
    for rollouts in chunks:
        await step.train(rollouts)
    metrics = await step.end()
    """

    def __init__(self, algorithm: Algorithm, session: Session, number: int):
        self.begun: list[Sequence[Rollout]] = []
        """Rollouts of each chunk, that of a call that failed included."""
        self.chunks: list[Chunk] = []
        """Rollouts that were trained on, with the values of their tokens."""
        self.updates: list[Metrics] = []
        """Metrics of each optimizer step."""
        self._algorithm = algorithm
        self._session = session
        self._number = number

    async def train(self, rollouts: Sequence[Rollout]) -> None:
        """Add the gradient of ``rollouts``; take all optimizer steps on them except for the
        last.
        """
        self.begun.append(rollouts)
        algorithm = self._algorithm
        with self._session.watch.span("train"):
            batch = await algorithm.prepare(self._session, rollouts)
        found: dict[str, torch.Tensor] = {}
        *earlier, last = algorithm.minibatches(batch, self._number)
        for minibatch in earlier:
            await self._accumulate(minibatch, batch, found)
            self.updates.append(await algorithm.update(self._session))
        await self._accumulate(last, batch, found)
        self.chunks.append(Chunk(rollouts=rollouts, columns=_recorded(batch, found)))

    async def end(self) -> dict[str, float]:
        """Take the last optimizer step; return the metrics of the step."""
        self.updates.append(await self._algorithm.update(self._session))
        return dict(Metrics.merged(self.updates)) | self._algorithm.finish()

    async def _accumulate(
        self, minibatch: Batch, batch: Batch, found: dict[str, torch.Tensor]
    ) -> None:
        """Add the gradient of ``minibatch``, a part of ``batch``. The trainer's outputs are added
        to ``found`` for the tokens that it has no outputs of yet.
        """
        outputs = await self._algorithm.accumulate(self._session, minibatch)
        rows = minibatch.rows
        index = torch.arange(len(batch.tokens)) if rows is None else batch.token_index(rows)
        for output, name in FOUND.items():
            if output in outputs:
                unknown = torch.full((len(batch.tokens),), torch.nan)
                column = found.setdefault(name, unknown)
                column[index] = torch.where(column[index].isnan(), outputs[output], column[index])


def _recorded(batch: Batch, found: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return the columns to record; tokens that were not sampled have 0."""
    own = {name: each for name, each in batch.columns.items() if name not in RECORDED_ELSEWHERE}
    return {name: (each * batch.loss_mask).numpy() for name, each in (own | found).items()}
