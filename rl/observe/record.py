"""The run folder: everything a run writes down about itself."""

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

from rl.disk import sync_file, sync_folder, write_whole
from rl.errors import RunError, require
from rl.types import Rollout


def run_folder(name: str, output_dir: str, *, resume: bool) -> Path:
    """Return the folder of a run of config ``name``.

    Raises ConfigError if it would go over another, or has none to resume.
    """
    folder = (
        Path(output_dir) if output_dir else _unused(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    )
    holds_run = (folder / "config.json").exists()
    require(
        resume or not holds_run,
        f"output_dir: {folder} already holds a run; add --resume to go on with it, or name another "
        "folder",
    )
    require(
        holds_run or not resume,
        f"--resume: output_dir {str(folder)!r} holds no run; name the folder of the run to go on "
        "with",
    )
    return folder


def _unused(name: str) -> Path:
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for path in map(Path, names) if not path.exists())


class RunRecord:
    """A run folder, made if it is not there.

    =====================  =============================================================
    ``config.json``        the frozen config
    ``metrics.jsonl``      one object per step
    ``rollouts.jsonl``     one object per recorded rollout, with its tokens and log-probs
    ``ledger.jsonl``       one object per step: which prompt_ids it trained on and which were
                           dropped, by reason, and how many are where
    ``evaluations.jsonl``  one object per evaluation, with the step whose weights it is of
    ``checkpoints/``       written by the trainer
    ``logs/``              one file per process; ``run.log``: what the run said, with times
    ``summary.json``       what a finished run came to
    ``failure.json``       why a run failed
    ``owner.json``         the process that writes here (FolderOwner)
    =====================  =============================================================

    A number that is not finite is written as ``null``, since JSON has no NaN; metrics and
    evaluations give it back as NaN. A kill at any moment leaves whole ``.json`` files and at most
    one torn last line in a ``.jsonl`` file, which readers pass over. What a method wrote is on disk
    when the method returns. Every write raises RunError, naming the file, if the disk is full or
    the file cannot be written.
    """

    def __init__(
        self, folder: str | Path, logs: str | Path = "", *, check: Callable[[], None] = lambda: None
    ):
        """``logs`` if it is not ``folder``/logs, as that of one attempt of several.

        ``check`` is called before each write, and returns if this process still owns the folder.
        """
        self.folder = Path(folder)
        self.check = check
        self.checkpoints = self.folder / "checkpoints"
        self.logs = Path(logs or self.folder / "logs")
        self.run_log = self.folder / "logs" / "run.log"
        self.metrics_path = self.folder / "metrics.jsonl"
        self.rollouts_path = self.folder / "rollouts.jsonl"
        self.ledger_path = self.folder / "ledger.jsonl"
        self.evaluations_path = self.folder / "evaluations.jsonl"
        for path in (self.checkpoints, self.logs, self.run_log.parent):
            with failing_loudly(path):
                path.mkdir(parents=True, exist_ok=True)
                sync_folder(self.folder.parent)

    def write_config(self, config: dict) -> None:
        self._write_json("config.json", config)

    def write_summary(self, summary: dict) -> None:
        self._write_json("summary.json", summary)

    def write_failure(self, failure: dict) -> None:
        self._write_json("failure.json", failure)

    def append_metrics(self, row: dict) -> None:
        """One line for the step ``row["step"]``, on disk when this returns."""
        self._append(self.metrics_path, [_step_first(row)])

    def append_ledger(self, row: dict) -> None:
        """One line for what became of the prompt_ids in the step ``row["step"]``."""
        self._append(self.ledger_path, [_step_first(row)])

    def append_evaluation(self, row: dict) -> None:
        """One line for an evaluation of the weights after the step ``row["step"]``."""
        self._append(self.evaluations_path, [_step_first(row)])

    def append_rollouts(self, step: int, rollouts: Iterable[Rollout]) -> None:
        """One line per rollout that was trained on at ``step``."""
        self._append(self.rollouts_path, [_rollout_row(step, rollout) for rollout in rollouts])

    def read_metrics(self) -> list[dict]:
        """All rows of ``metrics.jsonl``, in order; empty before the first step."""
        return _read_numbers(self.metrics_path)

    def read_evaluations(self) -> list[dict]:
        """All rows of ``evaluations.jsonl``, in order; empty before the first."""
        return _read_numbers(self.evaluations_path)

    def drop_after(self, step: int) -> None:
        """Forget what came after ``step``: a run that resumes from its checkpoint calls this first.

        Cuts every ``.jsonl`` file behind the last whole row with that step or an earlier one, and
        removes ``summary.json`` and ``failure.json`` of the attempt before.
        """
        with failing_loudly(self.folder):
            self.check()
        for path in (
            self.metrics_path,
            self.rollouts_path,
            self.ledger_path,
            self.evaluations_path,
        ):
            keep = 0
            for row, end in _rows(path):
                if row["step"] > step:
                    break
                keep = end
            if path.exists():
                with failing_loudly(path):
                    # one system call: done or not done, whenever we are killed
                    os.truncate(path, keep)
        for name in ("summary.json", "failure.json"):
            (self.folder / name).unlink(missing_ok=True)

    def _append(self, path: Path, rows: list[dict]) -> None:
        lines = "".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)
        with failing_loudly(path):
            self.check()
            is_new = not path.exists()
            with open(path, "a", encoding="utf-8") as file:
                file.write(lines)
                sync_file(file)
            if is_new:
                sync_folder(self.folder)

    def _write_json(self, name: str, content: dict) -> None:
        path = self.folder / name
        text = json.dumps(finite(content), indent=2, allow_nan=False) + "\n"
        with failing_loudly(path):
            self.check()
            write_whole(path, lambda file: file.write(text.encode()))


def _rollout_row(step: int, rollout: Rollout) -> dict:
    return {
        "step": step,
        "prompt_id": rollout.prompt.prompt_id,
        "sample": rollout.sample,
        "task": rollout.prompt.task,
        "reward": rollout.reward,
        "metrics": rollout.metrics,
        "prompt": rollout.prompt.text,
        "answer": rollout.prompt.answer,
        "completion": rollout.text,
        "stop_reason": rollout.stop_reason,
        "sequences": [
            {
                "tokens": sequence.tokens.tolist(),
                "sampled": sequence.sampled.astype(int).tolist(),
                "logprobs": sequence.logprobs.tolist(),
                "versions": sequence.versions.tolist(),
            }
            for sequence in rollout.sequences
        ],
    }


def _step_first(row: dict) -> dict:
    return {"step": row["step"], **row}


def _rows(path: Path) -> Iterator[tuple[dict, int]]:
    """Each whole row with the offset of its end, in bytes; a last line without an end is no row."""
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
                raise RunError(
                    f"{path} line {number}: not JSON: {error}; remove the line"
                ) from None
            yield row, end


def _read_numbers(path: Path) -> list[dict]:
    return [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row, _ in _rows(path)
    ]


def finite(value: Any) -> Any:
    """``value`` with None for every number that is not finite."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


# Advice by errno, before the one that always fits.
_MAKE_ROOM = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room or ")
_ALLOW = dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS), "make it writable for this user or "
)
_CHECK = dict.fromkeys(
    (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV), "check the storage or "
)
_ADVICE = _MAKE_ROOM | _ALLOW | _CHECK


@contextmanager
def failing_loudly(path: Path) -> Iterator[None]:
    """Raise RunError, which names ``path``, the error and what to do, for an OSError of the
    block.
    """
    try:
        yield
    except OSError as error:
        advice = f"{_ADVICE.get(error.errno or 0, '')}choose another --output-dir"
        raise RunError(f"{path}: cannot be written: {error.strerror}; {advice}") from error
