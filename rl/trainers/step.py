"""One step of an RL run: the gradient of its chunks, and its optimizer steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rl.metrics import Metrics
from rl.observe.rollout_files import Chunk
from rl.session.session import Session
from rl.trainers.algorithm import Algorithm
from rl.types import Batch, Rollout

FOUND = {"logprobs": "trainer_logprobs", "entropy": "entropy"}
"""Column by output of the trainer's gradient pass."""

RECORDED_ELSEWHERE = ("behaviour_logprobs", "versions", "staleness")
"""Columns of a batch that the sequences of its rollouts have, or that follow from them."""


@dataclass(eq=False)
class Step:
    """Step ``number`` of ``algorithm`` on the models of ``session``. ::

    step = Step(algorithm, session, number)
    for rollouts in chunks:
        await step.train(rollouts)
    metrics = await step.end()
    """

    algorithm: Algorithm
    session: Session
    number: int
    rollouts: list[Sequence[Rollout]] = field(default_factory=list, init=False)
    """Rollouts of each chunk, that of a call that failed included."""
    chunks: list[Chunk] = field(default_factory=list, init=False)
    """Rollouts that were trained on, with the values of their tokens."""
    updates: list[Metrics] = field(default_factory=list, init=False)
    """Metrics of each optimizer step."""

    def __post_init__(self) -> None:
        self.algorithm.temperature = self.algorithm.run.temperature(self.number)

    async def train(self, rollouts: Sequence[Rollout]) -> None:
        """Add the gradient of ``rollouts``; take all optimizer steps on them except for the
        last.
        """
        self.rollouts.append(rollouts)
        algorithm = self.algorithm
        with self.session.watch.span("train"):
            batch = await algorithm.prepare(self.session, rollouts)
        outputs: dict[str, torch.Tensor] = {}
        *earlier, last = algorithm.minibatches(batch, self.number)
        for minibatch in earlier:
            await self._accumulate(minibatch, batch, outputs)
            self.updates.append(await algorithm.update(self.session))
        await self._accumulate(last, batch, outputs)
        recorded = {
            name: values for name, values in batch.columns.items() if name not in RECORDED_ELSEWHERE
        }
        # tokens that were not sampled have 0
        columns = {
            name: (values * batch.loss_mask).numpy()
            for name, values in (recorded | outputs).items()
        }
        self.chunks.append(Chunk(rollouts=rollouts, columns=columns))

    async def end(self) -> dict[str, float]:
        """Take the last optimizer step; return the metrics of the step."""
        self.updates.append(await self.algorithm.update(self.session))
        temperature = {"rollout/temperature": self.algorithm.temperature}
        return temperature | dict(Metrics.merged(self.updates)) | self.algorithm.finish()

    async def _accumulate(
        self, minibatch: Batch, batch: Batch, columns: dict[str, torch.Tensor]
    ) -> None:
        """Add the gradient of ``minibatch``, a part of ``batch``. The trainer's outputs are added
        to ``columns`` for the tokens that it has no outputs of yet.
        """
        outputs = await self.algorithm.accumulate(self.session, minibatch)
        rows = minibatch.rows
        index = torch.arange(len(batch.tokens)) if rows is None else batch.token_index(rows)
        for output, name in FOUND.items():
            if output in outputs:
                unknown = torch.full((len(batch.tokens),), torch.nan)
                column = columns.setdefault(name, unknown)
                column[index] = torch.where(column[index].isnan(), outputs[output], column[index])
