"""Writes private files completely or not at all, locks folders, and opens files safely."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llamaq.worker.core.saved_cells import SavedCells

TEMPORARY = ".tmp"
"""Suffix of the names of unfinished files."""

LOCK = "lock"
"""Name of the file that is locked in a claimed folder."""

MAX_FOLDERS = 256


def make_private_folder(folder: Path) -> None:
    """Create the folder with mode 0700. A folder that exists gets that mode."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)


def claim_folder(folder: Path, key: str) -> tuple[Path, int]:
    """Lock the first of the folders `<key>`, `<key>.1`, ... that no other process has locked.

    Args:
        folder: The parent folder. It is created if it does not exist.
        key: The name of the first folder to try.

    Returns:
        The locked folder, and the file descriptor of its lock. The lock ends when the descriptor is closed.

    Raises:
        OSError: All `MAX_FOLDERS` folders are locked, or the file system returns an error.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(MAX_FOLDERS):
        claimed = folder / (f"{key}.{number}" if number else key)
        make_private_folder(claimed)
        lock = lock_folder(claimed)
        if lock is not None:
            mark_used(lock)
            return claimed, lock
    raise OSError(f"{MAX_FOLDERS} other workers use {folder}: name another folder")


def lock_folder(folder: Path) -> int | None:
    """Lock a folder.

    Returns:
        The file descriptor of the lock, which ends when the descriptor is closed. None: another process has locked it.

    Raises:
        OSError: The file system returns an error.
    """
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(lock)
        if isinstance(exc, BlockingIOError):
            return None
        raise
    return lock


def mark_used(lock: int) -> None:
    """Record in the time of the lock's file that its folder is used now."""
    with suppress(OSError):  # then only the times of its other files say when the folder was used
        os.utime(lock)


def is_locked_folder(folder: Path, lock: int) -> bool:
    """Return whether `lock` is the lock of the folder at this path. False: the folder or its lock file was deleted.

    Raises:
        OSError: The file system returns an error.
    """
    try:
        return os.path.samestat((folder / LOCK).stat(), os.fstat(lock))
    except FileNotFoundError:
        return False


def write_file(path: Path, *parts: SavedCells, is_synced: bool = False) -> None:
    """Write the parts into a file of mode 0600 that replaces `path` in one step.

    Args:
        path: The final name.
        parts: The contents of the file, in their order.
        is_synced: Whether to wait until the disk has the data. If not, a power failure may leave a torn file at
            `path`, so readers must verify a checksum.

    Raises:
        OSError: The file cannot be written. The file at `path` is unchanged.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=TEMPORARY, delete=False) as file:
        try:
            for part in parts:
                file.write(part)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises `OSError` when it is not a plain file, for example a link or a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file")
    return os.fdopen(descriptor, "rb", buffering=0)


def file_size(file: BinaryIO) -> int:
    """Return the size of the file in bytes."""
    return os.fstat(file.fileno()).st_size


def read_up_to(file: BinaryIO, n_bytes: int) -> bytes:
    """Read `n_bytes`, or fewer at the end of the file. It repeats `read`, because one call returns at most 2 GiB."""
    data = file.read(n_bytes)
    while len(data) < n_bytes and (more := file.read(n_bytes - len(data))):
        data += more
    return data
