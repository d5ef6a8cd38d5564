"""Cache of a reference policy's scores, in one file of the run folder."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from rl.config import PreferenceConfig
from rl.data.preferences import Labelled, Pair
from rl.host.disk import write_whole
from rl.observe.record import failing_loudly

EVERY_S = 5.0
"""Time between two writes of the file, and between two lines of progress."""

PARTS = ("train", "eval")
Items = Sequence[Pair | Labelled]


class ReferenceScores:
    """Two scores of the reference for each entry of a part, ``train`` or ``eval``.

    Entries are appended in order. The file is replaced as a whole, so a kill loses at most the
    entries of the last EVERY_S seconds. Entries are used again only if these are unchanged:

    - ``data``: digest of examples, order, and numerics of the reference.
    - ``source``: names, sizes and times of the files that the reference starts from. If these have
      changed, the digest of its weights decides.

    ``path`` is the file. ``note`` shows a line.
    """

    def __init__(self, path: Path, *, data: str, source: str, note: Callable[[str], None]):
        self._path = path
        self._facts = {"data": data, "source": source, "weights": ""}
        self._note = note
        self._written = 0.0
        self._rows = {part: torch.empty(0, 2, dtype=torch.float64) for part in PARTS}
        self._is_confirmed = False  # whether the entries are those of these weights
        self._read()

    def count(self, part: str) -> int:
        """Return the number of entries of ``part``."""
        return len(self._rows[part])

    def at(self, part: str, places: Sequence[int]) -> torch.Tensor:
        """Return the entries at ``places``, float64 [n, 2]."""
        return self._rows[part][torch.tensor(places)]

    @contextmanager
    def adding(self, weights: str) -> Iterator[None]:
        """Write added entries when the block ends, however it ends.

        ``weights`` is the digest of the reference's weights. Entries of other weights are dropped.
        """
        if self._facts["weights"] not in ("", weights):
            self._note(f"{self._path.name} is computed again: the reference has changed")
            self._rows = {part: rows[:0] for part, rows in self._rows.items()}
        self._facts["weights"] = weights
        self._is_confirmed = True
        try:
            yield
        finally:
            self._write()

    def add(self, part: str, entries: torch.Tensor) -> bool:
        """Append ``entries``, float64 [n, 2]; return whether the file was written."""
        self._rows[part] = torch.cat([self._rows[part], entries])
        is_due = time.monotonic() - self._written >= EVERY_S
        if is_due:
            self._write()
        return is_due

    def has(self, counts: Mapping[str, int]) -> bool:
        """Whether each part has as many entries as ``counts`` says, of unchanged weights."""
        lacking = [part for part, count in counts.items() if self.count(part) < count]
        return not lacking and (self._is_confirmed or not any(counts.values()))

    def _read(self) -> None:
        if not self._path.exists():
            return
        try:
            with safe_open(self._path, framework="pt") as file:
                metadata = file.metadata() or {}
                rows = {part: file.get_tensor(part) for part in PARTS}
        except (OSError, SafetensorError) as error:
            self._note(f"{self._path.name} is computed again: it cannot be read: {error}")
            return
        if metadata.get("data") != self._facts["data"]:
            self._note(f"{self._path.name} is computed again: examples or their order have changed")
            return
        self._rows = rows
        self._is_confirmed = metadata["source"] == self._facts["source"]
        self._facts["weights"] = metadata["weights"]

    def _write(self) -> None:
        content = save(self._rows, metadata=self._facts)
        with failing_loudly(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, lambda file: file.write(content))
        self._written = time.monotonic()


def data_digest(config: PreferenceConfig, train: Items, held_out: Items) -> str:
    """Return a digest of the examples and of all settings that change their reference scores,
    except for the weights.
    """
    numerics = config.trainer.training
    facts: list[Any] = [
        config.seed,
        config.examples_per_step,
        config.task.max_tokens,
        config.loss.length_normalized,
        numerics.dtype,
        numerics.mixed_precision_param,
        repr(config.trainer.float8),
    ]
    digest = blake2b(json.dumps(facts).encode(), digest_size=16)
    for items in (train, held_out):
        digest.update(f"/{len(items)}/".encode())
        for item in items:
            for example in item.examples:
                digest.update(len(example).to_bytes(8, "little"))
                digest.update(example.tokens.tobytes())
                digest.update(example.trained.tobytes())
    return digest.hexdigest()


def source_digest(config: PreferenceConfig) -> str:
    """Return a digest of names, sizes and times of the files that the reference starts from."""
    facts = []
    for folder in (config.model.hf_path, config.trainer.checkpoint.initial_load_path):
        paths = sorted(Path(folder).iterdir()) if folder else []
        for path in paths:
            with suppress(FileNotFoundError):  # a dangling link
                status = path.stat()
                facts.append((path.name, status.st_size, status.st_mtime_ns))
    return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
