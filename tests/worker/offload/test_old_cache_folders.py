"""Blocks of folders that no worker uses are erased, the longest unused first, until the rest is small enough."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from tests.support.disk_blocks import Warnings

from llamaq.worker.offload import old_cache_folders
from llamaq.worker.offload.atomic_files import LOCK, claim_folder
from llamaq.worker.offload.old_cache_folders import MAX_RECENT_FOLDERS, RECENT_S, erase_old_blocks

BLOCK = "a" * 64 + ".kv"


def add_folder(cache_dir: Path, name: str, n_bytes: int, used_s: float) -> Path:
    """Add a folder with one block."""
    folder = cache_dir / name
    folder.mkdir(parents=True)
    (folder / LOCK).touch()
    (folder / BLOCK).write_bytes(bytes(n_bytes))
    (folder / "notes.txt").write_text("not ours")
    for file in (LOCK, BLOCK):
        os.utime(folder / file, (used_s, used_s))
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
    assert (folder / BLOCK).exists(), "the worker may be about to start again"
    os.utime(folder / LOCK, (1000.0, 1000.0))
    erase_old_blocks(tmp_path, 0)
    assert not (folder / BLOCK).exists()
    _, lock = claim_folder(tmp_path, folder.name)
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


@pytest.mark.parametrize(("n_recent", "n_erased"), [(1, 3), (MAX_RECENT_FOLDERS, 3), (MAX_RECENT_FOLDERS + 2, 5)])
def test_folders_of_the_last_day_are_erased_last_and_some_of_them_never(
    tmp_path: Path, n_recent: int, n_erased: int
) -> None:
    """Their workers may still load their models."""
    now_s = time.time()
    old_s, recent_s = [now_s - RECENT_S - number for number in (3, 2, 1)], [now_s - 60 + n for n in range(n_recent)]
    folders = [add_folder(tmp_path, f"{number:032x}", 20, used_s) for number, used_s in enumerate(old_s + recent_s)]
    for number in range(100, 110):  # empty folders do not count
        (add_folder(tmp_path, f"{number:032x}", 20, now_s) / BLOCK).unlink()
    erase_old_blocks(tmp_path, 0)
    assert [(folder / BLOCK).exists() for folder in folders] == [number >= n_erased for number in range(len(folders))]


@pytest.mark.parametrize("n_kept", [1, 4])
def test_folders_of_the_last_day_count_with_the_others(tmp_path: Path, n_kept: int) -> None:
    times_s = [1000.0, 1001.0, 1002.0, time.time()]
    folders = [add_folder(tmp_path, f"{number:032x}", 20, used_s) for number, used_s in enumerate(times_s)]
    erase_old_blocks(tmp_path, 20 * n_kept)
    assert [(folder / BLOCK).exists() for folder in folders] == [number >= 4 - n_kept for number in range(4)]


@pytest.mark.parametrize("has_bad_lock", [True, False])
def test_a_folder_with_an_error_does_not_keep_the_others_from_being_erased(
    tmp_path: Path, warnings: Warnings, monkeypatch: pytest.MonkeyPatch, has_bad_lock: bool
) -> None:
    folders = [add_folder(tmp_path, letter * 32, 20, 1000.0 + number) for number, letter in enumerate("abc")]
    bad, unlink = folders[0], Path.unlink

    def refuse_bad(path: Path, missing_ok: bool = False) -> None:
        if path.parent == bad:
            raise PermissionError(path)
        unlink(path, missing_ok)

    if has_bad_lock:
        (bad / LOCK).unlink()
        (bad / LOCK).mkdir()
    else:
        monkeypatch.setattr(Path, "unlink", refuse_bad)
    erase_old_blocks(tmp_path, 0)
    assert [(folder / BLOCK).exists() for folder in folders] == [True, False, False]
    assert [str(bad) in line for line in warnings] == [True]


def test_a_cache_folder_that_cannot_be_read_causes_a_warning(tmp_path: Path, warnings: Warnings) -> None:
    erase_old_blocks(tmp_path / "missing", 0)
    assert ["old_blocks_not_erased" in line for line in warnings] == [True]


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = add_folder(tmp_path / "elsewhere", "a" * 32, 20, 1000.0)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / elsewhere.name).symlink_to(elsewhere)
    erase_old_blocks(tmp_path / "cache", 0)
    assert (elsewhere / BLOCK).exists()


def test_the_unfinished_files_of_a_killed_worker_count_and_are_erased(tmp_path: Path) -> None:
    folder = add_folder(tmp_path, "a" * 32, 20, 1000.0)
    unfinished = folder / "tmpabc.tmp"
    unfinished.write_bytes(bytes(80))
    os.utime(unfinished, (1000.0, 1000.0))
    erase_old_blocks(tmp_path, 100)
    assert unfinished.exists()
    erase_old_blocks(tmp_path, 99)
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, "notes.txt"]


def test_a_worker_gets_its_folder_while_another_worker_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = add_folder(tmp_path, "a" * 32, 20, 1000.0), old_cache_folders._read
    claims: list[tuple[Path, int]] = []

    def read_while_a_worker_starts(path: Path) -> object:
        claims.append(claim_folder(tmp_path, folder.name))
        return read(path)

    monkeypatch.setattr(old_cache_folders, "_read", read_while_a_worker_starts)
    erase_old_blocks(tmp_path, 0)
    ((claimed, lock),) = claims
    os.close(lock)
    assert claimed == folder
    assert (folder / BLOCK).exists(), "the worker that has just started uses it"
