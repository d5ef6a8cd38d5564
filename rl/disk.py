"""Durable writes: when a call returns, its file or folder is on disk."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, BinaryIO

from rl.errors import at_end


def temporary_folder(prefix: str, within: Path | None = None) -> TemporaryDirectory[str]:
    """Return a new folder that ends with its block, or with the program if that ends first."""
    folder = TemporaryDirectory(prefix=prefix, dir=within)
    at_end.append(folder.cleanup)
    return folder


def sync_file(file: IO[Any]) -> None:
    """Return when the content of ``file`` is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the entries of ``folder``, names and deletions, are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file by ``write``; it gets the name ``path`` once its content is on disk."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        write(file)
        sync_file(file)
    os.replace(partial, path)
    sync_folder(path.parent)


def replace_folder(folder: Path, whole: Path) -> None:
    """Rename ``whole`` to ``folder``, which it replaces. The files of ``whole`` are on disk."""
    sync_folder(whole)
    shutil.rmtree(folder, ignore_errors=True)
    whole.rename(folder)
    sync_folder(folder.parent)
