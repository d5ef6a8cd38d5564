"""Checkpoints by ``tinker://`` paths, and the folders that hold weights."""

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl.tinker.errors import UserError
from rl.tinker.protocol import NAME
from rl.tinker.store import Record, Store

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Type of a checkpoint in answers, by the kind in its path."""


class Checkpoints:
    """Named weights of models. Several checkpoints, models and samplers may hold one folder, which
    is deleted when none of them does. Facts have its name within ``folder``, so that the whole may
    be moved or copied. A start deletes only what the store names. ::

        path = checkpoints.path("sess-1:train:0", "weights", "step-1")
        with checkpoints.new_folder() as folder:
            await session.save_state(folder, adapter="sess-1:train:0")
            checkpoints.put(path, folder, model="sess-1:train:0", ...)
    """

    def __init__(self, store: Store, folder: Path, warn: Callable[[str], object]):
        self._store = store
        self._facts = store.facts["checkpoint"]
        self._folder = folder
        folder.mkdir(exist_ok=True)
        used = self._used() - {""}
        for name in store.facts["folder"].keys() - used:  # of a process that was killed
            self._delete(name)
            store.drop("folder", name)
        there = {entry.name for entry in folder.iterdir()}
        if missing := used - there:
            warn(
                f"{folder} lacks {len(missing)} folders of weights, such as {min(missing)}; "
                "restore them from a backup, or their models and checkpoints cannot be loaded"
            )
        if others := there - used:
            warn(
                f"{folder} has {len(others)} entries that server.db does not name, such as "
                f"{min(others)}; they are kept, delete what you do not need"
            )

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """Yield a folder that does not exist yet, deleted unless something holds it at the end."""
        name = secrets.token_hex(8)
        self._store.put("folder", name, {})
        try:
            yield self._folder / name
        finally:
            self.release(name)

    def at(self, name: str) -> Path:
        """Return the folder that a fact names. Facts of older servers have a path."""
        return self._folder / _name(name)

    def path(self, model: str, kind: str, name: str, *, overwrite: bool = True) -> str:
        """Return the path of a checkpoint to be. Raises UserError if it cannot have this name."""
        if not NAME.fullmatch(name):
            raise UserError(f"{name!r} is not a name: use up to 200 letters, digits and . _ : -")
        path = f"tinker://{model}/{kind}/{name}"
        if path in self._facts and not overwrite:
            raise UserError(f"{path} exists; choose another name, or overwrite it")
        return path

    def put(self, path: str, folder: Path, **fields: Any) -> int:
        """Add or replace a checkpoint; return its size. ``fields`` are facts about it."""
        before = self._facts.get(path, {})
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
        record: Record = {
            "folder": folder.name,
            "time": time.time(),
            "size": sum(sizes),
            "public": False,
        }
        self._store.put("checkpoint", path, {**record, "key": secrets.token_urlsafe(24), **fields})
        self.release(before.get("folder", ""))
        return record["size"]

    def find(self, path: str, *kinds: str) -> Record:
        """Return the facts about a checkpoint. Raises UserError if it does not exist, has expired,
        or is of none of ``kinds``, by default all.
        """
        fact, now = self._facts.get(path), time.time()
        if fact is None or (fact["expires"] or now) < now:
            raise UserError(f"there is no checkpoint {path!r}, or it has expired")
        if path.split("/")[-2] not in (kinds or TYPES):
            raise UserError(f"{path} is of another kind than {' and '.join(kinds)}")
        return fact

    def delete(self, path: str) -> None:
        """Delete a checkpoint, and its folder once nothing holds it."""
        self.release(self._store.drop("checkpoint", path)["folder"])

    def expire(self) -> None:
        """Delete the checkpoints whose time is over."""
        now = time.time()
        for path in [path for path, fact in self._facts.items() if (fact["expires"] or now) < now]:
            self.delete(path)

    def release(self, folder: str) -> None:
        """Delete a folder unless something holds it."""
        name = _name(folder)
        if name and name not in self._used():
            asyncio.get_running_loop().create_task(self._remove(name))

    async def _remove(self, name: str) -> None:
        await self._store.until_written()  # nothing on disk names it any more
        await asyncio.to_thread(self._delete, name)
        self._store.drop("folder", name)

    def _delete(self, name: str) -> None:
        for path in self._folder.glob(f"{name}*"):  # also what was not complete
            shutil.rmtree(path, ignore_errors=True)

    def _used(self) -> set[str]:
        facts = (fact for kind in self._store.facts.values() for fact in kind.values())
        return {_name(fact.get(key, "")) for fact in facts for key in ("folder", "state", "live")}

    def rows(self, model: str | None = None) -> list[dict[str, Any]]:
        """Return the checkpoints of a model, or all, as clients list them, the oldest first."""
        return [
            {
                "checkpoint_id": "/".join(path.split("/")[-2:]),
                "checkpoint_type": TYPES[path.split("/")[-2]],
                "time": when(fact["time"]),
                "tinker_path": path,
                "size_bytes": fact["size"],
                "public": fact["public"],
                "user_metadata": fact["user_metadata"],
                "expires_at": fact["expires"] and when(fact["expires"]),
            }
            for path, fact in self._facts.items()
            if model in (None, fact["model"])
        ]


def _name(folder: str) -> str:
    return folder.rpartition("/")[2]


def until(seconds: int | None) -> float | None:
    """Return the time in Unix seconds after ``seconds``; None for never."""
    return None if seconds is None else time.time() + seconds


def when(seconds: float) -> str:
    """Return a time in Unix seconds in ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
