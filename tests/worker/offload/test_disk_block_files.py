"""The disk tier: a read returns None or the data that was written, and an invalid file causes no error."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaq.common.errors import InvalidSettings
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.saved_cells import Data
from llamaq.worker.kv_cache.blocks.block import FILE_BYTES, Block, WriteBlock
from llamaq.worker.kv_cache.blocks.block_tiers import BlockStore
from llamaq.worker.offload import disk_block_files
from llamaq.worker.offload.atomic_files import write_file
from llamaq.worker.offload.disk_block_files import DiskBlockFiles
from llamaq.worker.offload.disk_format import HEADER, checksum, encode_header, fingerprint_key

ROOMY = 10**9
SCOPE = Scope("tenant of ours", 2)
LIMIT_S = 60.0


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class Disk:
    """A block store with its files. It has no host memory, so every inserted block is written to disk at once."""

    def __init__(self, folder: Path, fingerprint: str = "model", *, host_bytes: int = 0, **limits: int) -> None:
        self.store = BlockStore(2, host_bytes, limits.pop("max_disk_bytes", ROOMY), can_cut=True)
        self.files = DiskBlockFiles(folder, fingerprint, **{"max_file_bytes": ROOMY, **limits})
        self.files.rebuild(self.store)

    def insert(self, tokens: Sequence[int], data: bytes = b"data", scope: Scope = SCOPE) -> None:
        packed = pack(tokens)
        for span in self.store.missing_spans(packed, scope):
            self.store.insert(packed, scope, span, data + bytes([span.end]))
        self.files.submit(self.store.drain_disk_operations())

    def blocks(self, tokens: Sequence[int], scope: Scope = SCOPE) -> tuple[Block, ...]:
        return self.store.match(pack(tokens), scope).blocks

    def read(self, tokens: Sequence[int], scope: Scope = SCOPE) -> list[Data | None]:
        return [self.files.read(block).result(LIMIT_S) for block in self.blocks(tokens, scope)]

    def flush(self) -> None:
        assert self.files.background.flush(LIMIT_S)
        for block in self.files.drain_failed_blocks():
            self.store.mark_file_lost(block)
        self.files.submit(self.store.drain_disk_operations())
        self.store.check_integrity()

    def close(self) -> None:
        self.files.close(LIMIT_S)

    @property
    def paths(self) -> list[Path]:
        return sorted(self.files.folder.glob("*.kv"), key=lambda path: path.read_bytes()[8 + 8 + 96 :][:8])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


class Warnings:
    """The messages that were logged at level WARNING or ERROR."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        return iter([each.getMessage() for each in self._caplog.records if each.levelno >= logging.WARNING])


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Warnings:
    return Warnings(caplog)


# ---- writing and reading


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


# ---- restart


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
from llamaq.worker.kv_cache.blocks.block import TokenSpan
from llamaq.worker.kv_cache.blocks.block_tiers import BlockStore
from llamaq.worker.offload.disk_block_files import DiskBlockFiles
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
files = DiskBlockFiles(Path(sys.argv[1]), "model", max_file_bytes=10**9)
store = BlockStore(2, 0, 10**9, can_cut=True)
store.insert(bytes(8), Scope("x"), TokenSpan(0, 2), b"data")
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


# ---- damage


def test_a_file_that_is_damaged_later_removes_its_block_and_the_descendants(tmp_path: Path, warnings: Warnings) -> None:
    with Disk(tmp_path) as disk:
        disk.insert(range(8))
        disk.flush()
        path = disk.paths[1]
        path.write_bytes(path.read_bytes()[:-30] + b"x" + path.read_bytes()[-29:])
        assert disk.read(range(8)) == [b"data\x02", None, b"data\x06", b"data\x08"]
        disk.flush()
        assert len(disk.store) == 1
        disk.flush()
        assert len(disk.paths) == 1
        assert [f"bad_file file={path}" in line for line in warnings] == [True]


def test_a_missing_file_is_a_warning_and_no_error(tmp_path: Path, warnings: Warnings) -> None:
    with Disk(tmp_path) as disk:
        disk.insert([1, 1])
        disk.flush()
        disk.paths[0].unlink()
        assert disk.read([1, 1]) == [None]
        disk.flush()
        assert len(disk.store) == 0
        assert len(list(warnings)) == 1


def damaged(content: bytes, data: st.DataObject) -> bytes:
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "zeros", "garbage", "swap"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "grow":
        return content + data.draw(st.binary(min_size=1, max_size=20))
    if kind == "zeros":
        return content[:at] + bytes(len(content) - at)
    if kind == "garbage":
        return data.draw(st.binary(max_size=300))
    return content[at:] + content[:at]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_file_is_never_read_as_other_data(data: st.DataObject) -> None:
    logging.disable()
    try:
        with tempfile.TemporaryDirectory() as folder:
            with Disk(Path(folder)) as disk:
                disk.insert([1, 2], bytes(range(50)))
                disk.flush()
                (path,) = disk.paths
                content = path.read_bytes()
                path.write_bytes(damaged(content, data))
                is_same = path.read_bytes() == content
                (read,) = disk.read([1, 2])
                assert read == (bytes(range(50)) + b"\x02" if is_same else None)
            with Disk(Path(folder)) as disk:  # a valid header may precede damaged data
                assert disk.read([1, 2]) in ([], [None], [bytes(range(50)) + b"\x02"])
                if not is_same:
                    assert disk.read([1, 2]) in ([], [None])
    finally:
        logging.disable(logging.NOTSET)


def test_invalid_lengths_in_a_header_are_detected(tmp_path: Path, warnings: Warnings) -> None:
    with Disk(tmp_path) as disk:
        disk.insert([1, 2])
        disk.flush()
        (path,) = disk.paths
    for start, end, n_bytes in [(0, 2**62, 5), (0, 2**40, 2**40), (0, 2, 2**63), (2, 0, 5), (0, 2, 2**64 - 1)]:
        header = HEADER.pack(b"llamaqKV", 1, 0, fingerprint_key("model"), bytes(32), bytes(32), start, end, n_bytes)
        path.write_bytes(header + bytes(40))
        with Disk(tmp_path) as disk:
            assert len(disk.store) == 0
    assert all("torn" in line for line in warnings)


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
