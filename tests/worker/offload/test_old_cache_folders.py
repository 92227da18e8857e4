"""Blocks of folders that no worker uses are erased, the longest unused first, until the rest is small enough."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from llamaq.worker.offload.atomic_files import LOCK, claim_folder
from llamaq.worker.offload.old_cache_folders import erase_old_blocks

BLOCK = "a" * 64 + ".kv"


def add_folder(cache_dir: Path, name: str, n_bytes: int, used_s: float) -> Path:
    """Add a folder with one block."""
    folder = cache_dir / name
    folder.mkdir(parents=True)
    (folder / LOCK).touch()
    (folder / BLOCK).write_bytes(bytes(n_bytes))
    (folder / "notes.txt").write_text("not ours")
    os.utime(folder / BLOCK, (used_s, used_s))
    return folder


@pytest.mark.parametrize(("max_bytes", "n_erased"), [(60, 0), (59, 1), (40, 1), (39, 2), (0, 3)])
def test_the_folders_unused_for_the_longest_time_are_erased_first(
    tmp_path: Path, max_bytes: int, n_erased: int
) -> None:
    names = ("c" * 32, "a" * 32, "b" * 32 + ".1")
    folders = [add_folder(tmp_path, name, 20, 1000.0 + number) for number, name in enumerate(names)]
    other = add_folder(tmp_path, "models", 1000, 1.0)
    erase_old_blocks(tmp_path, max_bytes)
    assert [(folder / BLOCK).exists() for folder in folders] == [number >= n_erased for number in range(3)]
    assert (other / BLOCK).exists(), "not a folder of blocks"
    assert all((folder / "notes.txt").exists() for folder in folders)


def test_a_folder_that_a_worker_uses_is_not_erased_and_can_be_claimed_afterwards(tmp_path: Path) -> None:
    folder = add_folder(tmp_path, "a" * 32, 20, 1000.0)
    claimed, lock = claim_folder(tmp_path, folder.name)
    assert claimed == folder
    erase_old_blocks(tmp_path, 0)
    assert (folder / BLOCK).exists()
    os.close(lock)
    erase_old_blocks(tmp_path, 0)
    assert not (folder / BLOCK).exists()
    _, lock = claim_folder(tmp_path, folder.name)
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
