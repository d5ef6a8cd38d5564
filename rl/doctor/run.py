"""Checks of a run folder, which is only read."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

from rl.config import RLConfig, RunConfig
from rl.doctor.findings import Finding, error, refused, warning
from rl.errors import RunError, error_text
from rl.observe.checkpoint_folders import ROLLOUTS, StepFolders
from rl.observe.owner import LEASE_S, read_owner
from rl.observe.record import rows_of
from rl.observe.rollout_files import read_groups
from rl.training.safe_reading import read_metadata

ROWS = ("metrics.jsonl", "ledger.jsonl", "evaluations.jsonl", "digests.jsonl")


def check_run(folder: Path, config: RunConfig | None) -> Iterator[Finding]:
    """Yield what is wrong with the run in ``folder``; ``config`` is None if it cannot be read."""
    name = config.trainer.checkpoint.folder if config else "checkpoints"
    yield from _check_checkpoints(StepFolders(folder / name), of_rl=isinstance(config, RLConfig))
    yield from _check_owner(folder)
    for name in ROWS:
        try:
            for _ in rows_of(folder / name):
                pass
        except RunError as reason:
            yield refused("run", reason, str(folder / name))
    yield from _check_failure(folder)


def _check_checkpoints(steps: StepFolders, *, of_rl: bool) -> Iterator[Finding]:
    complete = steps.complete()
    for step in steps.incomplete():
        if not complete or step > complete[-1]:
            what = f"{steps.path(step)} is incomplete: its save was cut off, or is going on"
            goes_on = f"goes on from step {complete[-1]}" if complete else "starts anew"
            fix = f"nothing; --resume {goes_on} and removes it"
            yield warning("run", str(steps.path(step)), what, fix)
    if not complete:
        what = f"{steps.folder} has no complete checkpoint"
        yield warning("run", str(steps.folder), what, "wait for the first; --resume starts anew")
        return
    path = steps.path(complete[-1])
    fix = f"delete {path}; --resume then goes on from the checkpoint before it"
    for what in _damages(path, of_rl=of_rl):
        yield error("run", str(path), what, fix)


def _damages(path: Path, *, of_rl: bool) -> Iterator[str]:
    """Yield what of a complete checkpoint cannot be read."""
    try:
        stored = read_metadata(path).storage_data
    except Exception as damage:  # of many kinds, from pickle
        yield f"{path / '.metadata'} cannot be read: {error_text(damage)}"
        return
    sizes: dict[str, int] = {}
    for item in stored.values():
        end = item.offset + item.length
        sizes[item.relative_path] = max(end, sizes.get(item.relative_path, 0))
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else 0
        if found < size:
            yield f"{file} has {found} bytes of {size}"
    try:
        if of_rl:
            read_groups(path / ROLLOUTS)
    except RunError as damage:
        yield str(damage)


def _check_owner(folder: Path) -> Iterator[Finding]:
    path = folder / "owner.json"
    name, elsewhere, alive = read_owner(folder)
    if not name:
        return
    if alive:
        fix = "wait for its end, or end it; until then no other run can write here"
        yield warning("run", str(path), f"{name} writes here", fix)
    elif elsewhere:
        since = time.time() - path.stat().st_mtime
        what = f"{name}, which another host ran, has not written for {since:.0f} s"
        fix = f"nothing; --resume waits {LEASE_S:.0f} s for it, and takes the folder over"
        yield warning("run", str(path), what, fix)


def _check_failure(folder: Path) -> Iterator[Finding]:
    path = folder / "failure.json"
    command = f"python -m rl.train --config {folder}/config.json --output-dir {folder} --resume"
    if not path.exists():
        return
    try:
        failure = json.loads(path.read_text())
        what = f"the run failed: {failure['error']}; at {failure['place']}"
        command = failure.get("command") or command
    except (OSError, ValueError, KeyError, TypeError) as damage:
        what = f"cannot be read: {error_text(damage)}"
    yield warning("run", str(path), what, f"fix the cause, then resume with: {command}")
