"""Supervised fine-tuning: cross-entropy of given conversations or texts."""

import math
from hashlib import blake2b
from typing import Any

from rl.config import SFTConfig
from rl.data.batches import batch_of
from rl.data.conversations import read_conversations
from rl.data.examples import Example
from rl.data.jsonl import Source
from rl.data.order import step_indices
from rl.dialects.choose import dialect_or_text
from rl.errors import require
from rl.roles import session_config
from rl.session.config import SessionConfig
from rl.trainers.life_cycle import MetricCalculator
from rl.trainers.start import reading
from rl.trainers.trainer import Trainer


class SFTTrainer(Trainer[SFTConfig]):
    """Trains a model on the tokens of an assistant, of completions or of texts. ::

        trainer = rl.SFTTrainer(config, dataset_train=rows)
        state = trainer.train()

    ``dataset_train`` and ``dataset_eval`` are rows: dicts in a list or a ``datasets.Dataset``, or
    the name of a JSONL file; by default the files of ``arguments.task``. The order of the examples
    is a function of seed and epoch, and each epoch has each example once.
    """

    dataset_train: list[Example]
    dataset_eval: list[Example]

    def configure_model(self) -> SessionConfig:
        return session_config(self.arguments)

    def configure_dataloaders(self) -> None:
        task = self.arguments.task
        hf_path = self.arguments.model.hf_path
        assert hf_path is not None, "validation requires it"
        with reading(quiet=self.arguments.quiet):
            dialect = dialect_or_text(hf_path)

            def read(source: Source) -> list[Example]:
                return [*read_conversations(source, dialect, task, section="task")]

            rows: Any = task.path if self.dataset_train is None else self.dataset_train
            held_out: Any = task.held_out_path if self.dataset_eval is None else self.dataset_eval
            require(
                not isinstance(rows, str) or bool(rows),
                "task.path is not set; name a JSONL file, or give the trainer dataset_train",
            )
            self.dataset_train = read(rows)
            if held_out:
                self.dataset_eval = read(held_out)
            else:
                split = split_examples(self.dataset_train, task.held_out_fraction)
                self.dataset_train, self.dataset_eval = split
        require(
            bool(self.dataset_train),
            f"task.held_out_fraction is {task.held_out_fraction}, which leaves no example to "
            "train on; lower it, or name a file of its own in task.held_out_path",
        )

    def configure_functions(self) -> None:
        self.loss = self.arguments.loss

    @property
    def total_steps(self) -> int:
        config = self.arguments
        if not config.epochs:
            return config.steps
        return math.ceil(config.epochs * len(self.dataset_train) / config.examples_per_step)

    async def train_step(self) -> bool:
        if self.leaving:
            return False
        config = self.arguments
        size = len(self.dataset_train)
        indices = step_indices(config.seed, self.step, config.examples_per_step, size)
        examples = [self.dataset_train[index] for index in indices]
        batch = batch_of(examples, reduction=self.loss.reduction, max_tokens=config.task.max_tokens)
        await self.session.forward_backward(batch, self.loss)
        metrics = await self.session.optim_step()
        self.step += 1
        row: dict[str, Any] = {
            "step": self.step,
            "policy_version": self.session.version,
            "epoch": self.step * config.examples_per_step / size,
            "tokens/trained": sum(int(each.trained.sum()) for each in examples),
            **metrics,
            **self.session.restarts,
        }
        self.report.step(row, [metrics], tokens=len(batch.tokens))
        return True

    async def after_step(self) -> None:
        every = self.arguments.validate_every
        if not (every and self.step % every == 0 and self.step < self.total_steps):
            return
        with self.watch.span("evaluate"):
            scores = await self.scores_unless_leaving()
        if scores:
            self.report.evaluation(self.step, scores)

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return ``eval/loss``, the mean negative log-prob of a trained token in nats, its
        exponential ``eval/perplexity``, and ``eval/tokens``, the number of trained tokens.

        ``metric_calculator`` gets a list of log-probs of trained tokens, one tensor per example.
        """
        size = self.arguments.examples_per_step
        logprobs = []
        for first in range(0, len(self.dataset_eval), size):
            batch = batch_of(self.dataset_eval[first : first + size])
            outputs = await self.session.forward(batch)
            rows = outputs["logprobs"].split(batch.lengths.tolist())
            masks = batch.loss_mask.split(batch.lengths.tolist())
            logprobs += [row[mask] for row, mask in zip(rows, masks, strict=True)]
        if not logprobs:
            return {}
        tokens = sum(len(each) for each in logprobs)
        loss = -sum(float(each.double().sum()) for each in logprobs) / tokens
        scores = {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, 700.0)),
            "eval/tokens": float(tokens),
        }
        if metric_calculator is not None:
            scores |= {f"eval/{name}": value for name, value in metric_calculator(logprobs).items()}
        return scores


def split_examples(examples: list[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """Return the examples to train on and those to hold out, a share ``fraction`` in expectation.

    A hash of its tokens decides for each example, so equal examples are on one side.
    """
    limit = int(fraction * 2**64)

    def is_held_out(example: Example) -> bool:
        digest = blake2b(example.tokens.tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < limit

    held_out = [is_held_out(example) for example in examples]
    pairs = [*zip(examples, held_out, strict=True)]
    train = [example for example, out in pairs if not out]
    return train, [example for example, out in pairs if out]
