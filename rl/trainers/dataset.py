"""Base of trainers on given examples: files, epochs, order and validation."""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

from rl.config import DatasetConfig, DatasetRunConfig
from rl.data.examples import Examples, HasExamples
from rl.data.jsonl import Source
from rl.data.order import stream_indices
from rl.data.sources import open_source
from rl.data.stored import parted
from rl.dialects.choose import dialect_or_text
from rl.dialects.dialect import Dialect
from rl.errors import RunError, require
from rl.model.reward_model import describe_stops
from rl.model.shape import shape_of
from rl.model.tokenizer import missing_stop_tokens, require_room
from rl.trainers.trainer import Trainer
from rl.trainers.trial import reading

Config = TypeVar("Config", bound=DatasetRunConfig)
Item = TypeVar("Item", bound=HasExamples)
Evaluate = Callable[[], Awaitable[dict[str, float]]]


class DatasetTrainer(Trainer[Config], Generic[Config, Item]):
    """Trains on examples in an order that is a function of seed and epoch.

    ``dataset_train`` and ``dataset_eval`` are rows: dicts in a list or a ``datasets.Dataset``, or
    the name of a file; by default those of ``arguments.task``. Each epoch has each example once.
    """

    dataset_train: Sequence[Item]
    dataset_eval: Sequence[Item]
    stop_token_ids: list[int]
    """Tokens that stop the examples, the most frequent one first."""
    _resumed = (0, 0)  # steps of the checkpoint, and examples in them

    @abstractmethod
    def read(self, source: Source, dialect: Dialect) -> Examples[Item]:
        """Return the examples of ``source``, in order."""

    def key(self, item: Item) -> bytes:
        """Return bytes that are the same for examples of one prompt: the tokens before the first
        one to train, or all tokens of a plain text.
        """
        example = item.examples[0]
        begin = int(example.trained.argmax())
        return example.tokens[: begin if begin > 1 else None].tobytes()

    def configure_dataloaders(self) -> None:
        data: DatasetConfig = self.arguments.task  # type: ignore[attr-defined]
        hf_path = self.arguments.model.hf_path
        assert hf_path is not None, "validation requires it"
        rows: Any = data if self.dataset_train is None else self.dataset_train
        held_out: Any = data.held_out() if self.dataset_eval is None else self.dataset_eval
        require(
            rows is not data or bool(data.path),
            "task.path is not set; name a JSONL file or dataset, or give the trainer dataset_train",
        )
        with reading(quiet=self.arguments.quiet):
            dialect = dialect_or_text(hf_path)
            require_room(dialect.tokenizer, shape_of(self.arguments.model).vocab_size)
            examples = self.read(rows, dialect)
            self.dropped = examples.dropped
            self.truncated = examples.truncated
            self.dataset_train = examples.items
            if held_out:
                held_out = open_source(held_out, "task.held_out_path")
                self.dataset_eval = self.read(held_out, dialect).items
        if not held_out:
            split = split_examples(self.dataset_train, data.held_out_fraction, self.key)
            self.dataset_train, self.dataset_eval = split
        stops = {dialect.tokenizer.eos_token_id, *dialect.stop_token_ids}
        last = Counter[int]()
        for item in self.dataset_train:
            for example in item.examples:
                last[int(example.tokens[example.trained.nonzero()[0][-1]])] += 1
        self.stop_token_ids = [token for token, _ in last.most_common() if token in stops]
        require(
            bool(self.dataset_train),
            f"task.held_out_fraction is {data.held_out_fraction}, which leaves no example to train "
            "on; lower it, or name a file of its own in task.held_out_path",
        )

    def assemble(self) -> None:
        self.run.describe = lambda path: describe_stops(path, self.stop_token_ids)
        for text in self.warnings() if self.run.folder is not None else []:
            self.run.events.warn(text)

    def warnings(self) -> list[str]:
        """Return warnings of the examples, for the start of the run."""
        source = self.arguments.model.hf_path
        new = missing_stop_tokens(Path(source), self.stop_token_ids) if source else []
        if not new:
            return []
        return [
            f"the examples stop with the tokens {new}, and generation from {source} does not stop "
            "there; the export also stops at them"
        ]

    async def snapshot(self) -> dict[str, Any]:
        return {
            "stop_token_ids": self.stop_token_ids,
            "examples_seen": self.examples_seen,
            "data_digest": self.data_digest,
        }

    async def restore(self, state: dict[str, Any]) -> None:
        """Go back to ``state``. Raises RunError if steps after it would repeat or leave out
        examples.
        """
        config = self.arguments
        step = state.get("step", 0)
        seen = state.get("examples_seen", step * config.examples_per_step)
        self._resumed = (step, seen)
        if state.get("data_digest", self.data_digest) != self.data_digest:
            raise RunError(
                "task: the examples differ from those that the run has trained on, so that some "
                "would be trained again and others never; give the run the same examples, or start "
                "a new run with model.hf_path set to an export of this one"
            )
        if config.epochs and seen != step * config.examples_per_step:
            left = config.epochs * len(self.dataset_train) - seen
            raise RunError(
                f"examples_per_step is {config.examples_per_step}, and the run has trained on "
                f"{seen} examples in {step} steps, so that epochs={config.epochs} sets no number "
                f"of steps; set epochs to 0 and steps to "
                f"{step + math.ceil(left / config.examples_per_step)}"
            )

    @cached_property
    def data_digest(self) -> str:
        """Digest of the examples to train on, in their order."""
        digest = blake2b(digest_size=16)
        for item in self.dataset_train:
            for example in item.examples:
                weights = example.trained if example.weights is None else example.weights
                facts = [len(example), getattr(item, "label", ""), getattr(item, "margin", "")]
                digest.update(f"{facts}".encode())
                digest.update(example.tokens.tobytes())
                digest.update(weights.tobytes())
        return digest.hexdigest()

    @property
    def examples_seen(self) -> int:
        """Number of examples in the steps that were taken."""
        step, seen = self._resumed
        return seen + (self.step - step) * self.arguments.examples_per_step

    def facts(self) -> dict[str, Any]:
        """Return the number of examples that are trained on, that were dropped for their length,
        and that were truncated, those held out by ``held_out_fraction`` included.
        """
        return {
            "examples": len(self.dataset_train),
            "examples_dropped": self.dropped,
            "examples_truncated": self.truncated,
        }

    @property
    def total_steps(self) -> int:
        config = self.arguments
        if not config.epochs:
            return config.steps
        return math.ceil(config.epochs * len(self.dataset_train) / config.examples_per_step)

    def next_examples(self) -> list[Item]:
        """Return the examples of the step after ``step``."""
        config = self.arguments
        size = len(self.dataset_train)
        count = config.examples_per_step
        indices = stream_indices(config.seed, self.examples_seen, count, size)
        return [self.dataset_train[index] for index in indices]

    def chunks(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Return ``items`` in lists of at most ``examples_per_step``."""
        size = self.arguments.examples_per_step
        return [items[first : first + size] for first in range(0, len(items), size)]

    def row(self) -> dict[str, Any]:
        """Return the metrics that every kind of run has, for the step that was just counted."""
        return {
            "step": self.step,
            "policy_version": self.session.version,
            "epoch": self.examples_seen / len(self.dataset_train),
            **self.session.restarts,
        }

    async def between_steps(self) -> None:
        """Do the evaluations that are due after this step, unless the run is left meanwhile or has
        done them before.
        """
        if not self.report.evaluated < self.step < self.total_steps:
            return
        due = self.due()
        if not due:
            return

        async def all_of(due: list[Evaluate]) -> dict[str, float]:
            return {name: value for evaluate in due for name, value in (await evaluate()).items()}

        if self.step == 0:
            self.run.progress.stage("evaluating the initial weights")
        if self.arguments.best.metric:
            await self.run.save_checkpoint()
        with self.run.watch.span("evaluate"):
            scores = await self.run.unless_leaving(all_of(due))
        if scores is None:
            await self.session.abort()
        elif scores:
            self.report.evaluation(self.step, scores)

    def due(self) -> list[Evaluate]:
        """Return the evaluations that are due after this step."""
        config = self.arguments
        is_due = self.is_due(config.validate_every, at_start=config.validate_at_start)
        return [self.scores] if is_due else []

    def is_due(self, every: int, *, at_start: bool) -> bool:
        """Whether this step is one of each ``every`` steps, 0 for none, or is the start and
        ``at_start`` is set.
        """
        if self.step == 0:
            return at_start
        return every > 0 and self.step % every == 0


def split_examples(
    items: Sequence[Item], fraction: float, key: Callable[[Item], bytes]
) -> tuple[Sequence[Item], Sequence[Item]]:
    """Return the examples to train on and those to hold out, a share ``fraction`` in expectation.

    A hash of its key decides for each example, so examples of one key are on one side.
    """
    limit = int(fraction * 2**64)

    def is_held_out(item: Item) -> bool:
        return int.from_bytes(blake2b(key(item), digest_size=8).digest(), "little") < limit

    return parted(items, [is_held_out(item) for item in items])
