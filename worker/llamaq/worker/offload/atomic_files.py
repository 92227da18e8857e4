"""Files that are there wholly or not at all, and that only this user can read."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from llamaq.worker.core.kv_data import Data

TEMPORARY = ".tmp"
"""How the names of unfinished files end."""

LOCK = "lock"
"""The file that is locked in a claimed folder."""

MAX_FOLDERS = 256


def make_private_folder(folder: Path) -> None:
    """Create the folder for this user alone; one that is there is closed to others."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)


def claim_folder(folder: Path, key: str) -> tuple[Path, int]:
    """The first folder of this key that no other process has, and the descriptor of the lock that keeps it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(MAX_FOLDERS):
        own = folder / (f"{key}.{number}" if number else key)
        make_private_folder(own)
        lock = os.open(own / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return own, lock
    raise OSError(f"{MAX_FOLDERS} other workers use {folder}")


def write_file(path: Path, *parts: Data, is_synced: bool = False) -> None:
    """Write the parts into a file of mode 0600 that takes `path`'s place at once. `OSError` leaves nothing behind.

    Without `is_synced` a power failure may leave a torn file under the final name: readers verify a checksum.
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
    """Open for reading. `OSError` when it is not a plain file, such as a link or a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file")
    return os.fdopen(descriptor, "rb", buffering=0)


def size_of(file: BinaryIO) -> int:
    """In bytes."""
    return os.fstat(file.fileno()).st_size


def read_exactly(file: BinaryIO, n_bytes: int) -> bytes:
    """So many bytes, or fewer at the end of the file. One call of a raw file reads at most 2 GiB."""
    data = file.read(n_bytes)
    while len(data) < n_bytes and (more := file.read(n_bytes - len(data))):
        data += more
    return data
