"""The disk tier after a restart: it finds the blocks that were written, and uses no file that is incomplete."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.disk_blocks import LIMIT_S, Disk, Warnings, pack

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.kv_cache.blocks.block import FILE_BYTES
from llamaq.worker.offload.atomic_files import LOCK
from llamaq.worker.offload.disk_format import HEADER, fingerprint_key


def test_after_a_restart_all_blocks_are_found(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        disk.insert(range(9))
        disk.insert([0, 1, 5, 5], scope=Scope("other", 2))
        before = disk.store.disk_bytes
    with Disk(tmp_path) as disk:
        assert disk.store.disk_bytes == before
        assert disk.read(range(9)) == [b"data\x02", b"data\x04", b"data\x06", b"data\x08", b"data\x09"]
        assert disk.store.match(pack([0, 1, 5, 5]), Scope("other", 2)).n_tokens == 4
        assert disk.store.match(pack([0, 1, 5, 5]), Scope("third", 2)).n_tokens == 2
        assert disk.store.match(pack([0, 1, 5, 5]), Scope("other", 0)).n_tokens == 0
        disk.store.check_integrity()


def test_a_smaller_limit_after_a_restart_erases_the_oldest(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        for n in range(4):
            disk.insert([n, n])
        disk.flush()
        for age, path in enumerate(disk.paths):
            os.utime(path, (1000 - age, 1000 - age))
        oldest = disk.paths[-1]
    with Disk(tmp_path, max_disk_bytes=3 * (FILE_BYTES + 8 + 5)) as disk:
        disk.flush()
        assert len(disk.paths) == 3
        assert not oldest.exists()


def test_a_read_updates_the_modification_time(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        disk.insert([1, 1])
        disk.flush()
        os.utime(disk.paths[0], (1000, 1000))
        disk.read([1, 1])
        assert disk.paths[0].stat().st_mtime > 1000


def test_the_lock_of_a_folder_has_the_time_when_a_worker_locked_or_left_the_folder(tmp_path: Path) -> None:
    """Other workers do not erase a folder that was used a short time ago."""
    for _ in range(2):
        with Disk(tmp_path) as disk:
            lock = disk.files.folder / LOCK
            assert lock.stat().st_mtime > 1000
            os.utime(lock, (1000, 1000))
        assert lock.stat().st_mtime > 1000
        os.utime(lock, (1000, 1000))


def test_files_of_another_model_are_not_touched(tmp_path: Path) -> None:
    with Disk(tmp_path, "one") as disk:
        disk.insert([1, 1])
    with Disk(tmp_path, "two") as disk:
        assert len(disk.store) == 0
        disk.insert([1, 1])
        assert disk.files.folder.parent == tmp_path
    with Disk(tmp_path, "one") as disk:
        assert disk.read([1, 1]) == [b"data\x02"]


def test_two_workers_of_one_model_use_different_folders(tmp_path: Path) -> None:
    with Disk(tmp_path) as one, Disk(tmp_path) as two:
        one.insert([1, 1])
        two.insert([2, 2])
        one.flush()
        two.flush()
        assert len(two.paths) == len(one.paths) == 1
        assert two.files.folder == Path(f"{one.files.folder}.1")
    with Disk(tmp_path) as one, Disk(tmp_path) as two:
        assert one.read([1, 1]) == two.read([2, 2]) == [b"data\x02"]


def test_a_file_whose_parent_is_missing_is_erased(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Disk(tmp_path) as disk:
        disk.insert(range(6))
        disk.flush()
        disk.paths[1].unlink()
    caplog.set_level(logging.INFO)
    with Disk(tmp_path) as disk:
        assert "orphans_erased files=1" in caplog.text
        assert len(disk.paths) == len(disk.store) == 1


@pytest.mark.starts_processes
def test_a_process_that_dies_during_a_write_leaves_no_file_that_is_read_as_a_block(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.kv_cache.blocks.block import BlockSpan
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.offload.disk_block_files import DiskBlockFiles
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
files = DiskBlockFiles(Path(sys.argv[1]), "model", max_file_bytes=10**9)
store = BlockStore(2, 0, 10**9, can_cut=True)
store.insert(bytes(8), Scope("x"), BlockSpan(0, 2), b"data")
files.submit(store.drain_disk_operations())
files.background.flush(60)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=LIMIT_S)
    assert done.returncode == -9
    (folder,) = tmp_path.iterdir()
    assert [path.suffix for path in folder.iterdir() if path.name != "lock"] == [".tmp"]
    with Disk(tmp_path) as disk:
        assert disk.files.folder == folder, "the lock of the dead process is released"
        assert len(disk.store) == 0
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_invalid_files_are_not_used_and_logged_once_for_each_fault(tmp_path: Path, warnings: Warnings) -> None:
    with Disk(tmp_path) as disk:
        for n in range(8):
            disk.insert([n, n])
        disk.flush()
        good, torn, empty, other, newer, large, renamed, linked = disk.paths
        folder = disk.files.folder
    torn.write_bytes(torn.read_bytes()[:-1])
    empty.write_bytes(b"")
    other.write_bytes(other.read_bytes().replace(fingerprint_key("model"), bytes(32)))
    newer.write_bytes(b"llamaqKV\2" + newer.read_bytes()[9:])
    header = HEADER.pack(b"llamaqKV", 1, 0, fingerprint_key("model"), bytes(32), bytes(32), 0, 2, 10_000)
    large.write_bytes(header + bytes(8 + 10_000 + FILE_BYTES - HEADER.size))
    renamed.rename(folder / ("0" * 64 + ".kv"))
    linked.unlink()
    linked.symlink_to(good)
    (folder / "notes.txt").write_text("mine")
    (folder / ("f" * 64 + ".kv")).mkdir()
    with Disk(tmp_path, max_file_bytes=1000) as disk:
        assert len(disk.store) == 1
        assert set(warnings) == {
            f"disk_cache.ignored reason={reason} files={count} folder={folder}"
            for reason, count in [
                ("torn", 3),
                ("other_fingerprint", 1),
                ("foreign", 2),
                ("too_large", 1),
                ("unreadable", 2),
            ]
        }
        assert other.exists(), "files of other programs and models stay"
        assert newer.exists()
        assert (folder / "notes.txt").exists()
        assert not any(path.exists() for path in (torn, empty, large, folder / ("0" * 64 + ".kv")))
