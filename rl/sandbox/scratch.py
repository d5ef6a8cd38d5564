"""Folder of one program outside of namespaces, whatever the program makes of it."""

import os
import secrets
import tempfile

MOST_ENTRIES = 2_000  # more files count as a full disk


class Scratch:
    """Empty folder, which :meth:`remove` deletes with all its content."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="tiller-sandbox-")

    def exceeds(self, most: int) -> bool:
        """Whether the files take more than ``most`` bytes of disk, or are too many."""
        size = 0
        entries = 0
        folders = [self.path]
        while folders:
            try:
                found = list(os.scandir(folders.pop()))
            except OSError:  # removed meanwhile, or closed
                continue
            entries += len(found)
            for entry in found:
                try:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                except OSError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
            if size > most or entries > MOST_ENTRIES:
                return True
        return False

    def remove(self) -> None:
        """Delete the folder. Its processes must have ended.

        Neither depth, nor modes, nor links of the program's hinder that: what a folder holds is
        moved to the top before the folder is deleted.
        """
        os.chmod(self.path, 0o700)
        while entries := list(os.scandir(self.path)):
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    self._flatten(entry.path)
                else:
                    os.unlink(entry.path)
        os.rmdir(self.path)

    def _flatten(self, folder: str) -> None:
        os.chmod(folder, 0o700)
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, f"{self.path}/{secrets.token_hex(8)}")
            else:
                os.unlink(entry.path)
        os.rmdir(folder)
