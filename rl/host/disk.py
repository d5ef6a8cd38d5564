"""Durable writes: when a call returns, its file or folder is on disk."""

import atexit
import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from rl.errors import RunError, StorageFull, at_end, is_full

RENAME_EXCHANGE = 2


class TemporaryFolder:
    """New folder, deleted at the end of its ``with`` block or of the process that made it.

    Processes that are forked from that process leave the folder alone. A killed process leaves it
    behind. The next folder with this prefix removes it, if

    - no process has the kernel's lock on the file ``NAME.lock`` beside it, which ends with the
      process and those that were forked from it;
    - that file says that it was made since the boot of this host;
    - this user made both.
    """

    def __init__(self, prefix: str, within: Path | None = None):
        for left in Path(within or tempfile.gettempdir()).glob(f"{glob.escape(prefix)}*.lock"):
            with contextlib.suppress(OSError):
                _remove_left(left)
        self.name = tempfile.mkdtemp(prefix=prefix, dir=within)
        self._lock = os.open(f"{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, boot().encode())
        self._owner = os.getpid()
        at_end.append(self.cleanup)
        atexit.register(self.cleanup)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Delete the folder. Errors are ignored."""
        if os.getpid() == self._owner:
            self._owner = 0
            at_end.remove(self.cleanup)
            atexit.unregister(self.cleanup)
            shutil.rmtree(self.name, ignore_errors=True)
            if not os.path.lexists(self.name):
                Path(f"{self.name}.lock").unlink(missing_ok=True)
            os.close(self._lock)


def _remove_left(lock: Path) -> None:
    """Remove the folder of a killed process, and its lock."""
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = lock.with_suffix("")
        made = [os.fstat(descriptor), *([os.lstat(folder)] if os.path.lexists(folder) else [])]
        is_own = all(status.st_uid == os.geteuid() for status in made)
        if is_own and os.pread(descriptor, 100, 0) == boot().encode():
            if os.path.lexists(folder):
                remove_tree(folder)
            lock.unlink()
    finally:
        os.close(descriptor)


def remove_tree(top: Path) -> None:
    """Delete a folder that no process uses.

    Neither depth, nor modes, nor links hinder that: each folder is moved to the top before it is
    emptied.
    """
    os.chmod(top, 0o700)
    folders = [str(top)]
    for folder in folders:
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                folders.append(f"{top}/{secrets.token_hex(8)}")
                os.rename(entry.path, folders[-1])
            else:
                os.unlink(entry.path)
    for folder in reversed(folders):
        os.rmdir(folder)


def boot() -> str:
    """Return the id of the boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def steps_in(folder: Path, suffix: str = "", *, prefix: str = "step-") -> list[int]:
    """Return N of each entry ``prefix``N``suffix`` of ``folder``, in order."""
    names = os.listdir(folder) if folder.is_dir() else []
    matches = (re.fullmatch(rf"{prefix}(\d+){re.escape(suffix)}", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def sync_file(file: IO[Any]) -> None:
    """Wait until the content of ``file`` is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until created, renamed and deleted entries of ``folder``, or the content of a file, are
    on disk.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def end_of(path: Path, size: int) -> bytes:
    """Return the last ``size`` bytes of a file, or all of a shorter one."""
    with open(path, "rb") as file:
        file.seek(-min(size, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read(size)


def shorten(log: Path, most: int, tail_bytes: int) -> None:
    """Cut a log of more than ``most`` bytes to its last ``tail_bytes``, after a line that says so.
    The processes that write to it append.
    """
    size = log.stat().st_size if log.exists() else 0
    if size > most:
        end = end_of(log, tail_bytes)
        note = f"[{size - len(end):,} bytes before this line were dropped]\n"
        with open(log, "ab") as file:
            file.truncate(0)
            file.write(note.encode() + end)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file by calling ``write``. It is renamed to ``path`` once its content is on disk."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        write(file)
        sync_file(file)
    os.replace(partial, path)
    sync_folder(path.parent)


def replace_folder(folder: Path, whole: Path) -> None:
    """Replace ``folder`` by ``whole``, all of which is on disk then. A kill leaves one of the two
    under the name, or where names cannot be exchanged, the old one to ``restore_folder``.
    """
    for path in (*whole.rglob("*"), whole):
        sync_folder(path)
    old = _aside(folder)
    if os.path.lexists(folder):
        if exchange(folder, whole):
            old = whole
        else:
            shutil.rmtree(old, ignore_errors=True)
            os.rename(folder, old)
    if old != whole:
        os.rename(whole, folder)
    sync_folder(folder.parent)
    if old.is_symlink():
        old.unlink()
    shutil.rmtree(old, ignore_errors=True)


def restore_folder(folder: Path) -> None:
    """Take back the folder that a killed ``replace_folder`` had put aside."""
    if not os.path.lexists(folder) and os.path.lexists(old := _aside(folder)):
        os.rename(old, folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two entries at once; return whether the file system can do that."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (-100, os.fsencode(first.absolute()), -100, os.fsencode(second.absolute()))
    return rename is not None and rename(*names, RENAME_EXCHANGE) == 0


_ADVICE = {
    **dict.fromkeys(("ENOSPC", "EDQUOT"), "make room or "),
    **dict.fromkeys(("EACCES", "EPERM", "EROFS"), "make it writable for this user or "),
    **dict.fromkeys(("EIO", "ESTALE", "ETIMEDOUT", "ENODEV"), "check the storage or "),
}
"""First part of the advice, by the name of the error."""


@contextlib.contextmanager
def failing_loudly(path: Path) -> Iterator[None]:
    """Raise RunError, naming ``path``, the error and a remedy, for an OSError of the block."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(errno.errorcode.get(error.errno or 0, ""), "")
        advice += "choose another --output-dir"
        kind = StorageFull if is_full(error) else RunError
        raise kind(f"{path}: cannot be written: {error.strerror}; {advice}") from error
