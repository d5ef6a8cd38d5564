"""Supervised fine-tuning: cross-entropy of given conversations or texts."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, count, islice, pairwise
from typing import Any

from rl.config import SFTConfig
from rl.data.batches import batch_of
from rl.data.conversations import read_conversations
from rl.data.examples import Example, Examples
from rl.data.jsonl import Source
from rl.data.order import StrideSchedule, epoch_index
from rl.data.sources import set_names
from rl.dialects.dialect import Dialect
from rl.errors import require, require_value
from rl.trainers.dataset import DatasetTrainer, Evaluate
from rl.trainers.evaluation import Evaluation
from rl.trainers.hooks import MetricCalculator
from rl.trainers.trial import build_task, try_task

MAX_EXPONENT = 700.0
"""Largest loss with an exponential that is a float64."""


class SFTTrainer(DatasetTrainer[SFTConfig, Example]):
    """Trains a model on the tokens of an assistant, of completions or of texts. ::

        trainer = rl.SFTTrainer(config, dataset_train=rows)
        state = trainer.train()

    See :class:`rl.data.conversations.ConversationsConfig` for the forms of rows and for the tokens
    that are trained.
    """

    def read(self, source: Source, dialect: Dialect) -> Examples[Example]:
        return read_conversations(source, dialect, self.arguments.task, section="task")

    def configure_dataloaders(self) -> None:
        super().configure_dataloaders()
        data = self.arguments.task
        self._sets = sets_of(data.path, data.weights, self.dataset_train) if data.weights else None
        self.sampling = self.arguments.sampling_run()
        if self.sampling is not None:
            self.questions = build_task(self.sampling)
            try_task(self.sampling, self.questions, trains=False)
            stops = [*self.questions.stop_token_ids, *self.stop_token_ids]
            self.questions.stop_token_ids = tuple(dict.fromkeys(stops))

    def configure_functions(self) -> None:
        self.loss = self.arguments.loss
        self.task = None if self.sampling is None else self.sampling.task

    def assemble(self) -> None:
        super().assemble()
        if self.sampling is not None:
            self.evaluation = Evaluation(self.sampling, self.questions, self.session)

    def next_examples(self) -> list[Example]:
        """Return the examples of the step after ``step``, of each set in proportion to its weight
        if there are weights.
        """
        if self._sets is None:
            return super().next_examples()
        schedule, places = self._sets
        due = map(schedule.at, count(self.examples_seen))
        return [
            self.dataset_train[places[name][epoch_index(self.arguments.seed, k, len(places[name]))]]
            for name, k in islice(due, self.arguments.examples_per_step)
        ]

    async def train_step(self) -> bool:
        if self.leaving:
            return False
        examples = self.next_examples()
        longest = self.arguments.task.max_tokens
        batch = batch_of(examples, reduction=self.loss.reduction, max_tokens=longest)
        with self.run.step_calls():
            await self.session.forward_backward(batch, self.loss)
            metrics = await self.session.optim_step()
        self.step += 1
        trained = sum(int(example.trained.sum()) for example in examples)
        row = self.row() | {"tokens/trained": trained, **metrics}
        self.report.step(row, [metrics], tokens=len(batch.tokens))
        return True

    def due(self) -> list[Evaluate]:
        due: list[Evaluate] = []
        config = self.arguments
        if self.is_due(config.validate_every, at_start=config.validate_at_start):
            due.append(self.validation_scores)
        sampled = config.evaluation
        if sampled is not None and self.is_due(sampled.every, at_start=sampled.at_start):
            due.append(self.sampled_scores)
        return due

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return what ``validation_scores`` and, if ``evaluation`` is set, ``sampled_scores``
        return.
        """
        scores = await self.validation_scores(metric_calculator)
        return scores | (await self.sampled_scores() if self.sampling is not None else {})

    async def sampled_scores(self) -> dict[str, float]:
        """Bring the generators the weights; return what :meth:`Evaluation.scores` measures."""
        await self.session.push()
        return await self.evaluation.scores()

    def facts(self) -> dict[str, Any]:
        """Return entries of the summary: numbers of examples and, if completions are sampled for
        evaluations, the number of lost groups by reason.
        """
        lost = {} if self.sampling is None else {"lost": dict(self.session.rollouter.lost)}
        return super().facts() | lost

    async def validation_scores(
        self, metric_calculator: MetricCalculator | None = None
    ) -> dict[str, float]:
        """Return ``eval/loss``, the mean negative log-prob of a trained token in nats, its
        exponential ``eval/perplexity``, and ``eval/tokens``, the number of trained tokens.

        ``metric_calculator`` gets a list of log-probs of trained tokens, one tensor per example.
        """
        logprobs = []
        for examples in self.chunks(self.dataset_eval):
            batch = batch_of(examples)
            lengths = batch.lengths.tolist()
            outputs = await self.session.forward(batch)
            rows = zip(
                outputs["logprobs"].split(lengths), batch.loss_mask.split(lengths), strict=True
            )
            logprobs += [row[mask] for row, mask in rows]
        if not logprobs:
            return {}
        tokens = sum(len(values) for values in logprobs)
        loss = -sum(float(values.double().sum()) for values in logprobs) / tokens
        scores = {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, MAX_EXPONENT)),
            "eval/tokens": float(tokens),
        }
        if metric_calculator is not None:
            scores |= {f"eval/{name}": value for name, value in metric_calculator(logprobs).items()}
        return scores


def sets_of(
    path: str, weights: Mapping[str, float], examples: Sequence[Example]
) -> tuple[StrideSchedule, dict[str, range]]:
    """Return the order of the sets in ``path``, and the places of each in ``examples``. Raises
    ConfigError, naming ``task.weights``, if one cannot be drawn from.
    """
    names = set_names(path)
    require(
        len(names) > 1, "task.path names no sets with commas between them", field="task.weights"
    )
    counts = Counter(example.part for example in examples)
    ends = [0, *accumulate(counts[part] for part in range(len(names)))]
    places = {name: range(*bounds) for name, bounds in zip(names, pairwise(ends), strict=True)}
    for name, weight in weights.items():
        allowed = f"one of {', '.join(map(repr, places))}"
        require_value(name in places, "task.weights", name, allowed)
        problem = f"{name!r} has no example to train on"
        require(not weight or len(places[name]) > 0, problem, field="task.weights")
    require(any(weights.values()), "each weight is 0", field="task.weights")
    return StrideSchedule(weights), places
