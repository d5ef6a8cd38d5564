"""Owner of a run folder: the only process that writes there."""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

from rl.errors import (
    EXIT_INTERRUPTED,
    ConfigError,
    FolderInUse,
    at_end,
    end_program,
    printable,
    require,
)
from rl.host.disk import boot, failing_loudly

RENEW_S = 5.0
FENCE_S = 30.0
LEASE_S = 60.0
POLL_S = 0.2


class FolderOwner:
    """Ownership of a run folder, from construction to ``release``. A context manager.

    ``owner.json`` exists while a process owns the folder, and after that process was killed. The
    owner holds a kernel lock on the file and rewrites it every RENEW_S seconds. The file of a
    killed owner is replaced

    - on the same boot of the same host: as soon as the kernel grants the lock, which ends with its
      process;
    - on another host, whose kernel may not know of the lock: also after LEASE_S seconds without a
      change.

    An owner that could not rewrite the file for FENCE_S seconds writes nothing until ``check`` has
    found the owner's file again. An owner that finds another file, or none, ends the program.
    Removing the file takes the folder by force.
    """

    def __init__(self, folder: Path, *, wait_s: float = 0.0):
        """Wait up to ``wait_s`` seconds for a live owner to leave.

        Raises FolderInUse, naming the owner, after that, and RunError if the folder cannot be
        written.
        """
        self.folder = folder
        self._path = folder.absolute() / "owner.json"
        self._token = uuid.uuid4().hex
        self._host = socket.gethostname()  # which may change, and all texts have one length
        self._renewals = 0
        self._mutex = threading.RLock()
        self._released = threading.Event()
        with failing_loudly(self._path):
            self._renewed = _now()
            self._descriptor = self._take(wait_s)
        at_end.append(self.release)
        threading.Thread(target=self._keep, name="folder owner", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """End the ownership, and remove the folder if it is empty. Raises nothing."""
        if not self._mutex.acquire(timeout=RENEW_S):
            return  # the storage does not answer
        with contextlib.suppress(OSError):
            if not self._released.is_set():
                self._released.set()
                if _read(self._path).get("token") == self._token:
                    self._path.unlink()
                os.close(self._descriptor)
                self.folder.rmdir()
        self._mutex.release()

    def check(self) -> None:
        """Return if no other process can have taken the folder; otherwise end the program."""
        if _now() - self._renewed > FENCE_S:
            self._renew()

    def _keep(self) -> None:
        while not self._released.wait(RENEW_S):
            # while the storage does not answer, ``check`` blocks writes
            with contextlib.suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        with self._mutex:
            if self._released.is_set():
                return
            started = _now()
            owner = _read(self._path)
            if owner.get("token") != self._token:
                text = f"{self.folder}: {_name(owner)} has taken this folder"
                os.write(2, f"error: {text}; this run ends\n".encode())
                end_program(EXIT_INTERRUPTED)
            self._write(self._descriptor)
            self._renewed = started

    def _take(self, wait_s: float) -> int:
        """Return the descriptor of the locked file of this owner."""
        ends = _now() + wait_s
        announced = False
        seen = ""
        unchanged_since = _now()
        is_alive = False
        while True:
            if (created := self._create()) is not None:
                return created
            with contextlib.suppress(FileNotFoundError), self._path.open("r+") as file:
                is_free = _lock(file.fileno())
                text = file.read()
                if text != seen:
                    is_alive = bool(seen)
                    seen = text
                    unchanged_since = _now()
                owner = _parse(text)
                unchanged = _now() - unchanged_since
                # an owner that was killed before it could write leaves an empty file
                is_left = owner.get("boot") == boot() or (not owner and unchanged >= RENEW_S)
                has_ended = bool(is_free) and is_left
                is_expired = is_free is not False and unchanged >= LEASE_S
                if (has_ended or is_expired) and _is_at(self._path, file.fileno()):
                    self._path.unlink()
                    created = self._create()
                    if created is not None and not has_ended:
                        time.sleep(2 * RENEW_S)  # for the previous owner to renew its file
                    if created is not None and _read(self._path).get("token") == self._token:
                        return created
                    continue
                if _now() >= ends and (is_alive or is_free is False):
                    raise FolderInUse(f"{self.folder} is in use by {_name(owner)}")
                if not announced:
                    announced = True
                    message = f"{self.folder} belongs to {_name(owner)}; waiting for its end"
                    print(printable(message), flush=True)
            time.sleep(POLL_S)

    def _create(self) -> int | None:
        """Return the descriptor of a new file, locked; None if a file exists."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o644)
        except (FileExistsError, FileNotFoundError):
            return None  # not found: another owner has just removed the empty folder
        _lock(descriptor, wait=True)
        if not _is_at(self._path, descriptor):  # another owner took the empty file for a left one
            os.close(descriptor)
            return None
        self._write(descriptor)
        return descriptor

    def _write(self, descriptor: int) -> None:
        self._renewals += 1
        content = {
            "host": self._host,
            "pid": os.getpid(),
            "attempt": Path(os.environ.get("TILLER_LOGS", "")).name,
            "boot": boot(),
            "token": self._token,
            "renewals": f"{self._renewals:09d}",
        }
        os.pwrite(descriptor, json.dumps(content, indent=2).encode() + b"\n", 0)
        os.fsync(descriptor)


def run_folder(name: str, output_dir: str, *, resume: bool) -> Path:
    """Return the folder of a run of config ``name``.

    Raises ConfigError if the folder holds another run, or holds no run to resume.
    """
    folder = Path(output_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if not output_dir:
        names = chain([folder.name], (f"{folder.name}-{number}" for number in count(2)))
        folder = next(path for path in map(folder.with_name, names) if not path.exists())
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if nearest.is_symlink() and not nearest.exists():
        problem = f"{nearest} is a link to {os.readlink(nearest)}, which is missing"
        fix = "make that folder, or choose another --output-dir"
        raise ConfigError(problem, field="output_dir", fix=fix)
    try:
        holds_run = (folder / "config.json").exists()
    except OSError as error:
        problem = f"{folder} cannot be read: {error.strerror}"
        fix = "choose another --output-dir"
        raise ConfigError(problem, field="output_dir", fix=fix) from None
    problem = f"{folder} already holds a run"
    fix = "add --resume, or name another folder"
    require(resume or not holds_run, problem, field="output_dir", fix=fix)
    problem = f"output_dir {str(folder)!r} holds no run"
    fix = "name the folder of a run"
    require(holds_run or not resume, problem, field="--resume", fix=fix)
    return folder


def claim(name: str, output_dir: str, *, resume: bool, wait_s: float = 0.0) -> FolderOwner:
    """Own the folder of a run of config ``name``, created if it does not exist.

    Raises ConfigError if the folder holds another run, holds no run to resume, or is in use, and
    FolderInUse if the folder is still in use after ``wait_s`` > 0 seconds.
    """
    while True:
        folder = run_folder(name, output_dir, resume=resume)
        if not output_dir:
            with failing_loudly(folder):
                try:
                    folder.mkdir(parents=True)
                except FileExistsError:  # another run has just taken the name
                    continue
        try:
            owner = FolderOwner(folder, wait_s=wait_s)
        except FolderInUse as error:
            if wait_s:
                raise
            fix = "wait for its end, end it, or name another folder"
            raise ConfigError(str(error), field="output_dir", fix=fix) from None
        try:
            run_folder(name, str(folder), resume=resume)  # the previous owner may have left a run
        except ConfigError:
            owner.release()
            raise
        return owner


def read_owner(folder: Path) -> tuple[str, bool, bool]:
    """Return the name of the owner of a folder, empty if there is none, whether another host or
    boot runs it, and whether it may be alive. Takes no lock.
    """
    path = folder / "owner.json"
    owner = _read(path)
    if not owner:
        return "", False, False
    elsewhere = owner.get("boot") != boot()
    renewed = time.time() - path.stat().st_mtime < LEASE_S
    alive = renewed and (elsewhere or Path(f"/proc/{owner.get('pid')}").exists())
    return _name(owner), elsewhere, alive


def _lock(descriptor: int, *, wait: bool = False) -> bool | None:
    """Return whether the kernel granted the lock; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


def _read(path: Path) -> dict[str, Any]:
    try:
        return _parse(path.read_text())
    except FileNotFoundError:
        return {}


def _parse(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return {}  # another process is writing it


def _name(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    attempt = f", attempt {owner['attempt']}" if owner.get("attempt") else ""
    return f"process {owner.get('pid')} on {owner.get('host')}{attempt}"


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # also counts while the host sleeps
