"""The disk tier: a read returns None or the data that was written, and a disk that refuses writes causes no error."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.support.disk_blocks import LIMIT_S, ROOMY, SCOPE, Disk, Warnings, pack

from llamaq.common.errors import InvalidSettings
from llamaq.worker.kv_cache.blocks.block import BLOCK_BYTES, FILE_BYTES, BlockSpan, WriteBlock
from llamaq.worker.offload import disk_block_files
from llamaq.worker.offload.atomic_files import write_file
from llamaq.worker.offload.disk_block_files import DiskBlockFiles
from llamaq.worker.offload.disk_format import checksum, encode_header, fingerprint_key


class BlockedThread:
    """Blocks the background thread of the files, from the construction until the context is exited."""

    def __init__(self, files: DiskBlockFiles) -> None:
        self._is_over, is_blocked = threading.Event(), threading.Event()

        def wait() -> None:
            is_blocked.set()
            assert self._is_over.wait(LIMIT_S)

        files.background.submit(wait, urgent=True)
        assert is_blocked.wait(LIMIT_S)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._is_over.set()


def test_a_read_returns_the_data_that_was_written(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        disk.insert(range(5))
        disk.flush()
        assert disk.read(range(5)) == [b"data\x02", b"data\x04", b"data\x05"]
        assert sum(path.stat().st_size for path in disk.paths) == disk.store.disk_bytes


def test_only_this_user_can_read_the_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Disk(tmp_path / "a" / "cache") as disk:
            disk.insert(range(5))
            disk.flush()
            for path in disk.files.folder.iterdir():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            for folder in (disk.files.folder, disk.files.folder.parent):
                assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    finally:
        os.umask(before)


def test_a_folder_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        disk.files.folder.chmod(0o755)
    with Disk(tmp_path) as disk:
        assert stat.S_IMODE(disk.files.folder.stat().st_mode) == 0o700


def test_no_file_contains_its_namespace(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        disk.insert(range(5))
        disk.flush()
        for path in disk.paths:
            assert SCOPE.namespace.encode() not in path.read_bytes()
        assert SCOPE.namespace not in str(disk.paths)


def test_data_that_is_not_written_yet_is_read_from_memory(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        with BlockedThread(disk.files):
            disk.insert([1, 2])
            future = disk.files.read(disk.blocks([1, 2])[0])
            assert future.done()
            assert future.result() == b"data\x02"
            assert not disk.paths
            assert disk.files.pending_bytes == 5
            assert repr(disk.files) == f"<DiskBlockFiles {disk.files.folder} 1 files to write, 5 bytes>"
        disk.flush()
        assert disk.files.pending_bytes == 0
        assert len(disk.paths) == 1


def test_reads_are_done_before_writes(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        disk.insert([1, 2])
        disk.flush()
        with BlockedThread(disk.files):
            disk.insert([1, 2, *range(100)])
            future = disk.files.read(disk.blocks([1, 2])[0])
            future.add_done_callback(lambda _: written.append(len(disk.paths)))
            written: list[int] = []
        assert future.result(LIMIT_S) == b"data\x02"
        disk.flush()
        assert written == [1]


def test_a_block_that_is_erased_before_its_write_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def record(path: Path, *parts: bytes) -> None:
        written.append(path)
        write_file(path, *parts)

    monkeypatch.setattr(disk_block_files, "write_file", record)
    with Disk(tmp_path, max_disk_bytes=FILE_BYTES + 8 + 5) as disk:
        with BlockedThread(disk.files):
            for n in range(5):
                disk.insert([n, n])
            assert disk.files.pending_bytes == 5
        disk.flush()
        assert disk.paths == written
        assert disk.read([4, 4]) == [b"data\x02"]


def test_the_data_of_a_block_that_is_erased_before_its_write_is_freed_at_once(tmp_path: Path) -> None:
    buffers = [np.zeros(4, np.uint8) for _ in range(5)]
    references = [weakref.ref(buffer) for buffer in buffers]
    with Disk(tmp_path, max_disk_bytes=FILE_BYTES + 8 + 4) as disk:
        with BlockedThread(disk.files):
            for n in range(5):
                tokens = pack([n, n])
                disk.store.insert(tokens, SCOPE, BlockSpan(0, 2), buffers.pop().data)
                disk.files.submit(disk.store.drain_disk_operations())
            assert disk.files.pending_bytes == 4
            assert sum(reference() is not None for reference in references) == 1
        disk.flush()
        assert len(disk.paths) == 1


def test_writes_beyond_the_pending_limit_are_dropped(tmp_path: Path, warnings: Warnings) -> None:
    with Disk(tmp_path, max_pending_bytes=10) as disk:
        with BlockedThread(disk.files):
            for n in range(5):
                disk.insert([n, n])
        disk.flush()
        assert [bool(disk.blocks([n, n])) for n in range(5)] == [True, True, False, False, False]
        assert ["too slow" in line for line in warnings] == [True]


def test_the_files_are_behind_while_more_than_half_of_the_pending_limit_is_not_written(tmp_path: Path) -> None:
    with Disk(tmp_path, max_pending_bytes=10) as disk:
        was_behind = []
        with BlockedThread(disk.files):
            for n in range(2):
                disk.insert([n, n])
                was_behind.append(disk.files.is_behind)
        assert disk.files.background.flush(LIMIT_S)
        assert [*was_behind, disk.files.is_behind] == [False, True, False]


def test_a_single_write_may_exceed_the_pending_limit(tmp_path: Path) -> None:
    with Disk(tmp_path, max_pending_bytes=1) as disk:
        disk.insert([1, 1])
        disk.flush()
        assert disk.read([1, 1]) == [b"data\x02"]


def test_the_pending_limit_does_not_apply_to_data_that_is_still_in_host_memory(tmp_path: Path) -> None:
    with Disk(tmp_path, host_bytes=ROOMY, max_pending_bytes=0) as disk:
        with BlockedThread(disk.files):
            for n in range(5):
                disk.insert([n, n])
            disk.store.write_host_to_disk()
            disk.files.submit(disk.store.drain_disk_operations())
        disk.flush()
        assert len(disk.paths) == 5


def test_data_that_host_memory_evicts_before_its_write_is_limited(tmp_path: Path) -> None:
    data, host_bytes, max_pending_bytes = bytes(4000), 8 * (4001 + BLOCK_BYTES), 2 * 4001
    with Disk(tmp_path, host_bytes=host_bytes, max_pending_bytes=max_pending_bytes) as disk:
        pending = disk.files._pending
        with BlockedThread(disk.files):
            for prompt in range(10):
                tokens = range(prompt * 100, prompt * 100 + 16)
                for end in range(2, 17, 2):
                    disk.insert(tokens[:end], data)
                    evicted = sum(len(write.data) for write in pending.values() if write.block.data is None)
                    assert evicted <= host_bytes + max_pending_bytes
                    disk.mark_lost_files()
                    assert len(pending) == sum(block.on_disk for block in disk.store._tree)
            n_waiting = disk.files.background._n_waiting
            disk.insert(range(5000, 5016), data)
            disk.mark_lost_files()
            assert disk.files.background._n_waiting == n_waiting, "refused writes leave no work for the thread"
        disk.flush()
        assert len(disk.paths) == sum(block.on_disk for block in disk.store._tree)
        assert len(disk.paths) < len(disk.store), "blocks whose write was refused stay in host memory without a file"
        disk.store.write_host_to_disk()
        disk.files.submit(disk.store.drain_disk_operations())
        disk.flush()
        assert len(disk.paths) == len(disk.store)


def test_when_the_worker_stops_all_data_in_host_memory_is_written(tmp_path: Path) -> None:
    data, host_bytes = bytes(4000), 8 * (4001 + BLOCK_BYTES)
    with Disk(tmp_path, host_bytes=host_bytes, max_pending_bytes=2 * 4001) as disk:
        with BlockedThread(disk.files):
            for prompt in range(10):
                for end in range(2, 17, 2):
                    disk.insert(range(prompt * 100, prompt * 100 + end), data)
                    disk.mark_lost_files()
            in_host = [block for block in disk.store._tree if block.data is not None]
            disk.store.write_host_to_disk()
            disk.files.submit(disk.store.drain_disk_operations(), is_closing=True)
        disk.flush()
        assert len(in_host) == 8
        assert all(block.on_disk and block.data is not None for block in in_host)


@contextmanager
def refusing_writes(folder: Path) -> Iterator[None]:
    """Replace a folder by a link to nothing within this context."""
    aside = folder.rename(folder.with_name("aside"))
    folder.symlink_to("nothing")
    yield
    folder.unlink()
    aside.rename(folder)


def test_a_folder_that_is_deleted_is_made_and_locked_again(tmp_path: Path, warnings: Warnings) -> None:
    cache_dir = tmp_path / "cache"
    with Disk(cache_dir) as disk:
        disk.insert([1, 1])
        disk.flush()
        shutil.rmtree(cache_dir)
        disk.insert([2, 2])
        disk.flush()
        assert ["folder_was_deleted" in line for line in warnings] == [True]
        assert disk.read([2, 2]) == [b"data\x02"]
        assert stat.S_IMODE(disk.files.folder.stat().st_mode) == 0o700
        with Disk(cache_dir) as other:
            assert other.files.folder.name == f"{disk.files.folder.name}.1"
    with Disk(cache_dir) as restarted:
        assert restarted.files.folder == disk.files.folder
        assert restarted.read([2, 2]) == [b"data\x02"]


def test_a_deleted_folder_that_another_worker_has_taken_is_left_to_that_worker(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        folder = disk.files.folder
        shutil.rmtree(folder)
        with Disk(tmp_path) as other:
            disk.insert([2, 2])
            disk.flush()
            assert (other.files.folder, disk.files.folder.name) == (folder, f"{folder.name}.1")
            assert disk.read([2, 2]) == [b"data\x02"]


def test_a_disk_that_refuses_writes_loses_the_blocks_and_causes_one_warning(tmp_path: Path, warnings: Warnings) -> None:
    with Disk(tmp_path) as disk:
        with refusing_writes(disk.files.folder):
            for n in range(3):
                disk.insert([n, n])
                disk.flush()
        assert len(disk.store) == 0
        assert ["not_written" in line for line in warnings] == [True]
        disk.insert([7, 7])
        disk.flush()
        assert disk.read([7, 7]) == [b"data\x02"]
        with refusing_writes(disk.files.folder):
            disk.insert([8, 8])
            disk.flush()
        assert len(list(warnings)) == 2, "a write succeeded between the two warnings"


def test_a_block_that_could_not_be_written_stays_in_host_memory(tmp_path: Path) -> None:
    with Disk(tmp_path, host_bytes=ROOMY) as disk, refusing_writes(disk.files.folder):
        disk.insert(range(4))
        disk.store.write_host_to_disk()
        disk.files.submit(disk.store.drain_disk_operations())
        disk.flush()
        assert all(block.data is not None for block in disk.blocks(range(4)))
        assert disk.store.disk_bytes == 0


def test_close_finishes_pending_writes_and_stops_the_thread(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk, BlockedThread(disk.files):
        disk.insert(range(50))
        assert not disk.files.background.flush(0)
    assert len(disk.paths) == 25
    assert repr(disk.files.background) == "<BackgroundThread llamaq-disk closed 0 waiting>"
    with pytest.raises(CancelledError):
        disk.files.read(disk.blocks([0, 1])[0]).result(0)


def test_close_does_not_wait_longer_than_its_timeout(tmp_path: Path, warnings: Warnings) -> None:
    disk = Disk(tmp_path)
    with BlockedThread(disk.files):
        disk.insert(range(50))
        disk.files.close(0)
    assert ["closed_early files=25" in line for line in warnings] == [True]


def test_the_file_has_the_documented_format(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        disk.insert([1, 2])
        disk.flush()
        (path,), (block,) = disk.paths, disk.blocks([1, 2])
        header = encode_header(block, fingerprint_key("model"))
        assert path.read_bytes() == header + b"data\x02" + checksum(header, b"data\x02")
        assert path.name == block.name.hex() + ".kv"
        assert path.stat().st_size == block.file_bytes


def test_a_folder_that_cannot_be_created_is_an_invalid_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match="--cache-dir"):
        DiskBlockFiles(tmp_path / "file", "model", max_file_bytes=1)


def test_an_unexpected_exception_in_the_thread_is_logged_and_the_thread_continues(
    tmp_path: Path, warnings: Warnings
) -> None:
    with Disk(tmp_path) as disk:
        disk.insert([1, 1])
        block = disk.blocks([1, 1])[0]
        disk.files.submit([WriteBlock(block, "no bytes")])  # type: ignore[arg-type]
        disk.insert([2, 2])
        disk.flush()
        assert "disk_cache.defect" in list(warnings)
        assert disk.read([2, 2]) == [b"data\x02"]
