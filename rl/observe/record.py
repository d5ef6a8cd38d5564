"""Run folder: all records of a run."""

import asyncio
import json
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from rl.errors import RunError
from rl.host.disk import failing_loudly, replace_folder, sync_file, sync_folder, write_whole
from rl.observe.checkpoint_folders import ROLLOUTS, StepFolders
from rl.observe.events import Event, finite
from rl.observe.rollout_files import Chunk, RolloutFolder, delete_oldest, write_rollouts
from rl.types import Rollout

SYNCED = ("started", "checkpoint", "failed", "ended")
"""Kinds of events after which the file of events is synced to the disk."""

GATHERED = ("span", "arrived")
"""Kinds of events that are written with the next event of another kind: each process has some in
each step."""

UNWRITTEN = 4
"""Number of steps whose rollouts may wait to be written."""

_ENCODER = json.JSONEncoder(allow_nan=False)


class RunRecord:
    """A run folder, created if it does not exist.

    =====================  =============================================================
    ``config.json``        the frozen config
    ``events.jsonl``       what happened, one event a line (Events); only this file is never cut
    ``metrics.jsonl``      one object per step
    ``rollouts/``          one Parquet file per step: its rollouts, with all tokens; and
                           ``failed.parquet``: those with which a call failed
    ``tokenizer/``         the tokenizer, of a run with rollouts
    ``digests.jsonl``      one object per step: digests of gradient and weights
    ``ledger.jsonl``       one object per step: prompt_ids that it trained on, prompt_ids that
                           were dropped, by reason, and the number of prompts in each state
    ``evaluations.jsonl``  one object per evaluation, with the step of the evaluated weights
    ``evaluations/``       one Parquet file per evaluation: its rollouts
    ``profiles/``          one folder per profiled step, written by the ranks
    ``checkpoints/``       written by the trainer
    ``logs/``              one file per process; ``run.log``: messages of the run, with times
    ``summary.json``       results of a finished run
    ``failure.json``       cause of a failed run
    ``owner.json``         the process that writes here (FolderOwner)
    =====================  =============================================================

    Guarantees:

    - A number that is not finite is written as ``null``, since JSON has no NaN; metrics and
      evaluations are read back with NaN.
    - A kill at any moment leaves whole ``.json`` files, and at most one incomplete last line in a
      ``.jsonl`` file, which readers skip.
    - Data is on disk when the method that writes it returns, except for events: a kill loses spans
      and arrivals since the last other event, and a host that loses power all events since the last
      checkpoint.
    - A write that fails raises RunError, naming the file.
    """

    def __init__(
        self, folder: str | Path, logs: str | Path = "", *, check: Callable[[], None] = lambda: None
    ):
        """``logs`` is the folder of this attempt's logs; empty for ``folder``/logs.

        ``check`` is called before each write and returns if this process still owns the folder.
        """
        self.folder = Path(folder)
        self.check = check
        self.checkpoints = self.folder / "checkpoints"
        self.logs = Path(logs or self.folder / "logs")
        self.run_log = self.folder / "logs" / "run.log"
        self.events_path = self.folder / "events.jsonl"
        self.metrics_path = self.folder / "metrics.jsonl"
        self.digests_path = self.folder / "digests.jsonl"
        self.rollouts = RolloutFolder(self.folder / "rollouts")
        self.ledger_path = self.folder / "ledger.jsonl"
        self.evaluations_path = self.folder / "evaluations.jsonl"
        self.profiles = StepFolders(self.folder / "profiles")
        self.is_waiting = False
        """Whether the folder stays as it is, except for logs, since a checkpoint is not loaded."""
        self.evaluated = RolloutFolder(self.folder / "evaluations")
        self._gathered: list[str] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._unwritten: deque[Future[None]] = deque()
        for path in (self.checkpoints, self.logs, self.run_log.parent):
            with failing_loudly(path):
                path.mkdir(parents=True, exist_ok=True)
                sync_folder(self.folder.parent)

    def write_json(self, name: str, content: dict) -> None:
        """Write the file ``name`` of the folder."""
        path = self.folder / name
        text = json.dumps(finite(content), indent=2, allow_nan=False) + "\n"
        with self._writing(path):
            write_whole(path, lambda file: file.write(text.encode()))

    @property
    def failure_path(self) -> Path:
        """File of the cause if the run fails now: ``failure.json``, or
        ``logs/resume-failure.json`` if a resume has not loaded its checkpoint.
        """
        return self.folder / ("logs/resume-failure.json" if self.is_waiting else "failure.json")

    def write_failure(self, failure: dict) -> None:
        """Write ``failure_path`` once the rollouts of all steps are on disk."""
        self._writer.submit(lambda: None).result()  # this thread has only one worker
        self.write_json(str(self.failure_path.relative_to(self.folder)), failure)

    def write_failed_rollouts(self, chunks: Sequence[Chunk], *, version: int) -> None:
        """Write the rollouts with which a call failed to ``rollouts/failed.parquet``."""
        with self._writing(self.rollouts.failed):
            self.rollouts.folder.mkdir(exist_ok=True)
            write_rollouts(self.rollouts.failed, chunks, version=version)

    def write_groups(
        self, checkpoints: StepFolders, step: int, groups: Mapping[int, Sequence[Rollout]]
    ) -> None:
        """Begin the folder of checkpoint ``step``, which the trainer completes, with sampled
        ``groups`` by prompt_id.
        """
        path = checkpoints.path(step) / ROLLOUTS
        rollouts = [*chain.from_iterable(groups.values())]
        with self._writing(path):
            checkpoints.make(step)
            write_rollouts(path, [Chunk(rollouts=rollouts, columns={})])

    def keep_tokenizer(self, tokenizer: Any) -> None:
        """Write the tokenizer once, so that the run folder can be read without the model."""
        folder = self.folder / "tokenizer"
        if folder.is_dir():
            return
        partial = folder.with_name("tokenizer.partial")
        with self._writing(folder):
            tokenizer.save_pretrained(partial)
            replace_folder(folder, partial)

    def write_event(self, event: Event) -> None:
        """Append ``event``; write the row of metrics or of an evaluation to the file of its own.
        While the run ``is_waiting``, events wait too.
        """
        self._gathered.append(_line(event))
        kind = event["kind"]
        if kind in GATHERED or self.is_waiting:
            return
        lines = "".join(self._gathered)
        self._gathered.clear()
        path = self.events_path
        with self._writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(lines)
            if kind in SYNCED:
                sync_file(file)
        if kind == "metrics":
            self.append(self.metrics_path, event["metrics"])
        if kind == "evaluation":
            self.append(self.evaluations_path, {"step": event["step"], **event["metrics"]})

    def append(self, path: Path, row: dict) -> None:
        """Append one line for the step ``row["step"]`` to ``path``, one of the folder's ``.jsonl``
        files.
        """
        line = _line({"step": row["step"], **row})
        with self._writing(path):
            is_new = not path.exists()
            with open(path, "a", encoding="utf-8") as file:
                file.write(line)
                sync_file(file)
            if is_new:
                sync_folder(self.folder)

    async def begin_rollouts(self, step: int, chunks: Sequence[Chunk], **options: Any) -> None:
        """Begin to write the rollouts of ``step``, in a thread: see :meth:`RolloutFolder.write`.

        Waits while UNWRITTEN earlier steps are not on disk. If rollouts and evaluations then have
        more than ``max_bytes``, those of the oldest steps are deleted.
        """
        await self.rollouts_written(but=UNWRITTEN - 1)
        self._unwritten.append(
            self._writer.submit(self._write_rollouts, self.rollouts, step, chunks, **options)
        )

    async def rollouts_written(self, *, but: int = 0) -> None:
        """Wait until the rollouts of all steps but the ``but`` latest ones are on disk.

        Raises RunError if the rollouts of a step could not be written.
        """
        while self._unwritten and (len(self._unwritten) > but or self._unwritten[0].done()):
            await asyncio.wrap_future(self._unwritten[0])
            self._unwritten.popleft()

    async def write_evaluated(self, step: int, chunks: Sequence[Chunk], **options: Any) -> None:
        """Write the rollouts of the evaluation of the weights after ``step``, in a thread, with the
        options of ``begin_rollouts``. On disk on return.
        """
        await asyncio.wrap_future(
            self._writer.submit(self._write_rollouts, self.evaluated, step, chunks, **options)
        )

    def _write_rollouts(
        self,
        folder: RolloutFolder,
        step: int,
        chunks: Sequence[Chunk],
        *,
        max_bytes: float = math.inf,
        **options: Any,
    ) -> None:
        path = folder.path(step)
        with self._writing(path):
            folder.write(step, chunks, **options)
            delete_oldest([self.rollouts, self.evaluated], max_bytes, keep=path)

    def read_metrics(self) -> list[dict]:
        """Return all rows of ``metrics.jsonl``, in order."""
        return _read_numbers(self.metrics_path)

    def read_evaluations(self) -> list[dict]:
        """Return all rows of ``evaluations.jsonl``, in order."""
        return _read_numbers(self.evaluations_path)

    def drop_after(self, step: int) -> None:
        """Remove all records after ``step``, as a run that resumes from its checkpoint has to.

        Truncates every ``.jsonl`` file after the last whole row of ``step`` or an earlier step, and
        removes ``summary.json``, ``failure.json`` and ``rollouts/failed.parquet`` of the previous
        attempt.
        """
        with failing_loudly(self.folder):
            self.check()
        self._unwritten.clear()
        self._writer.submit(int).result()  # what is being written is taken back below
        if self.events_path.exists():  # new events would be appended to an incomplete last line
            with failing_loudly(self.events_path):
                with _mapped(self.events_path) as text:
                    end = text.rfind(b"\n") + 1
                os.truncate(self.events_path, end)
        self.rollouts.drop_after(step)
        self.evaluated.drop_after(step)
        self.profiles.forget_after(step)
        for path in [self.metrics_path, self.digests_path, self.ledger_path, self.evaluations_path]:
            keep = 0
            for row, end in rows_of(path):
                if row["step"] > step:
                    break
                keep = end
            if path.exists():
                with failing_loudly(path):
                    # one system call, so that a kill leaves the file as it was or truncated
                    os.truncate(path, keep)
        for name in ("summary.json", "failure.json"):
            (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """Check that this process may write, and name ``path`` if the block cannot write."""
        with failing_loudly(path):
            self.check()
            yield


def rows_of(path: Path) -> Iterator[tuple[dict, int]]:
    """Yield each whole row and the offset of its end, in bytes. Skip an incomplete last line."""
    if not path.exists():
        return
    end = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                row = json.loads(line)
            except ValueError as error:
                message = f"{path} line {number}: not JSON: {error}; remove the line"
                raise RunError(message) from None
            yield row, end


def _read_numbers(path: Path) -> list[dict]:
    rows = [row for row, _ in rows_of(path)]
    for row in rows:
        row |= {name: math.nan for name, value in row.items() if value is None}
    return rows


def rows_from_end(path: Path) -> Iterator[dict]:
    """Yield each whole row, the last one first. Read only as far as the caller goes."""
    with _mapped(path) as text:
        end = text.rfind(b"\n") + 1
        while end:
            begin = text.rfind(b"\n", 0, end - 1) + 1
            yield json.loads(text[begin:end])
            end = begin


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap | bytes]:
    """Yield the content of a file, whose pages are read when they are looked at."""
    if not path.exists() or not path.stat().st_size:  # an empty file cannot be mapped
        yield b""
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        yield text


def _line(row: dict) -> str:
    """Return ``row`` as one line of JSON, with null for every number that is not finite."""
    try:
        return _ENCODER.encode(row) + "\n"
    except ValueError:  # a number is not finite, which is rare
        return _ENCODER.encode(finite(row)) + "\n"
