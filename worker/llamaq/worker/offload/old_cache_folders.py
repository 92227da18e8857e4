"""Erases the blocks of earlier models and settings, which no worker uses now, if they take too much of the disk."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llamaq.worker.offload.atomic_files import LOCK, TEMPORARY, lock_folder
from llamaq.worker.offload.disk_block_files import FILE_NAME

log = logging.getLogger(__name__)

RECENT_S = 24 * 60 * 60.0
"""A folder that was used within this number of seconds may be that of a worker that restarts at the moment. A worker
locks its folder only after its model is loaded, because the name of the folder depends on the loaded model."""
MAX_RECENT_FOLDERS = 8
"""Number of recently used folders that are never erased: a machine with 8 devices often has 8 workers. More folders are
those of settings that were tried during the day."""

_FOLDER_NAME = re.compile(r"[0-9a-f]{32}(\.\d+)?")


@dataclass(frozen=True, slots=True)
class _OldFolder:
    """A folder of blocks that no running worker uses."""

    path: Path
    files: tuple[Path, ...]
    n_bytes: int
    used_s: float
    """When a worker last locked it, left it, or wrote or read a block in it, as Unix time in seconds."""


def erase_old_blocks(cache_dir: Path, max_bytes: int) -> None:
    """Erase the blocks in folders that no worker has locked, those unused for the longest time first.

    A worker with another model, other settings or another version of llama.cpp uses another folder. Without this call,
    the folders of earlier versions would stay forever.

    Args:
        cache_dir: The cache folder, shared by all models and workers.
        max_bytes: Upper bound on the size of the blocks that remain in these folders. Up to `MAX_RECENT_FOLDERS`
            folders that were used within the last `RECENT_S` seconds remain in any case.
    """
    folders = sorted(_old_folders(cache_dir), key=lambda folder: folder.used_s)
    n_bytes = sum(folder.n_bytes for folder in folders)
    recent_s = time.time() - RECENT_S
    for index, folder in enumerate(folders):
        is_kept = folder.used_s > recent_s and len(folders) - index <= MAX_RECENT_FOLDERS
        if n_bytes <= max_bytes or is_kept:
            return
        with _logged_errors(folder.path), _locked(folder.path) as is_locked:
            if is_locked:
                _erase(folder)
                n_bytes -= folder.n_bytes


def _old_folders(cache_dir: Path) -> list[_OldFolder]:
    """Return the folders with files that no worker has locked."""
    paths: list[Path] = []
    with _logged_errors(cache_dir), os.scandir(cache_dir) as entries:
        folder_entries = (entry for entry in entries if entry.is_dir(follow_symlinks=False))
        paths.extend(Path(entry.path) for entry in folder_entries if _FOLDER_NAME.fullmatch(entry.name))
    folders: list[_OldFolder] = []
    for path in paths:
        with _logged_errors(path):
            if _is_unused(path) and (folder := _read(path)).files:
                folders.append(folder)
    return folders


@contextmanager
def _logged_errors(folder: Path) -> Iterator[None]:
    """Log an `OSError`, so that one folder with an error does not keep the others from being erased."""
    try:
        yield
    except OSError as exc:
        log.warning("disk_cache.old_blocks_not_erased folder=%s error=%s", folder, exc)


def _is_unused(folder: Path) -> bool:
    """Whether no worker has locked the folder. The lock is not kept, because a worker may want the folder meanwhile."""
    with _locked(folder) as is_locked:
        return is_locked


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, unless a worker has locked it. Yields whether it is locked here."""
    lock = lock_folder(folder)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _read(path: Path) -> _OldFolder:
    """Return the blocks and the unfinished files of a folder, which is not locked."""
    files, n_bytes, used_s = [], 0, (path / LOCK).stat().st_mtime
    with os.scandir(path) as entries:
        for entry in entries:
            is_ours = FILE_NAME.fullmatch(entry.name) or entry.name.endswith(TEMPORARY)
            if is_ours and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # a worker that has just started may erase files
                    status = entry.stat(follow_symlinks=False)
                    files.append(Path(entry.path))
                    n_bytes += status.st_size
                    used_s = max(used_s, status.st_mtime)
    return _OldFolder(path, tuple(files), n_bytes, used_s)


def _erase(folder: _OldFolder) -> None:
    """Erase the files of a locked folder. The folder and its lock stay: another process may be about to lock it."""
    for file in folder.files:
        file.unlink(missing_ok=True)
    log.info("disk_cache.old_blocks_erased bytes=%d folder=%s", folder.n_bytes, folder.path)
