"""Private temporary folders. A folder whose process was killed is removed when another process creates one."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from llamaq.worker.offload.atomic_files import LOCK, is_locked_folder, lock_folder

PREFIX = "llamaq-redis-"


class PrivateFolder:
    """A folder of mode 0700 that is locked until `remove`.

    The end of the process removes it too, unless the process is killed.
    """

    def __init__(self) -> None:
        """Create the folder, and remove the folders of processes that were killed.

        Raises:
            OSError: The folder cannot be created.
        """
        _remove_abandoned()
        self._folder, self.lock = _create()
        """The file descriptor of the lock. A child process that inherits it keeps the folder too. None: the folder is
        not locked, and no other process removes it."""

    @property
    def path(self) -> Path:
        """The path of the folder."""
        return Path(self._folder.name)

    def remove(self) -> None:
        """Remove the folder. A second call does nothing."""
        self._folder.cleanup()
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def __repr__(self) -> str:
        return f"<PrivateFolder {self._folder.name}>"


def _create() -> tuple[tempfile.TemporaryDirectory[str], int | None]:
    """Create and lock a folder. If another process locks it first, to remove it, create another one."""
    while True:
        folder = tempfile.TemporaryDirectory(
            prefix=PREFIX, ignore_cleanup_errors=True
        )  # another process may look at it
        try:
            lock = lock_folder(Path(folder.name))
        except OSError:  # the file system has no locks
            return folder, None
        if lock is not None and is_locked_folder(Path(folder.name), lock):
            return folder, lock
        if lock is not None:
            os.close(lock)
        folder.cleanup()


def _remove_abandoned() -> None:
    """Remove the folders of this user whose locks no process holds any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or not (folder / LOCK).exists():
                continue  # without the file of the lock, nothing tells whether a process uses the folder
            lock = lock_folder(folder)
        except OSError:
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
