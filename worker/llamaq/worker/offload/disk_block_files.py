"""The disk tier of the prefix cache: one file for each block, written, read and erased by a background thread.

    <folder>/<hash of the fingerprint>/<name of the block>.kv

Each process locks its folder, so a second worker with the same fingerprint uses `<hash>.1`. A file gets its final name
only when it is complete, so a process that dies leaves no half-written block. Files are not synced, because waiting for
the disk on every write costs more than losing some files in a power failure. Every file is verified when it is read, so
a torn file is detected.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from llamaq.common.errors import InvalidSettings
from llamaq.worker.core.saved_cells import SavedCells
from llamaq.worker.kv_cache.blocks.block import Block, BlockHeader, DiskOperation, WriteBlock
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.offload.atomic_files import (
    LOCK,
    TEMPORARY,
    claim_folder,
    is_locked_folder,
    mark_used,
    open_file,
    write_file,
)
from llamaq.worker.offload.background_thread import BackgroundThread
from llamaq.worker.offload.disk_format import Fault, checksum, encode_header, fingerprint_key, read_data, read_header

log = logging.getLogger(__name__)

SUFFIX = ".kv"
MAX_PENDING_BYTES = 256 * 1024**2
FILE_NAME = re.compile(r"([0-9a-f]{64})\.kv")
_ERASED_FAULTS = frozenset({Fault.TORN, Fault.TOO_LARGE})
"""Files with these faults are erased when the worker starts. Other files may belong to another model or program."""


class DiskBlockFiles:
    """The files of one `BlockStore`. Implements `BlockFiles`.

    Call all methods on the engine thread. Only `rebuild` and `close` wait for the disk.
    """

    def __init__(
        self, folder: Path, fingerprint: str, *, max_file_bytes: int, max_pending_bytes: int = MAX_PENDING_BYTES
    ) -> None:
        """Lock a folder and start the background thread.

        Args:
            folder: The cache folder, shared by all models and workers.
            fingerprint: Identifies the model, the settings and the llama.cpp version that the data is valid for.
            max_file_bytes: Larger files are not used.
            max_pending_bytes: Upper bound on the data that waits to be written. Beyond this bound, the write of an
                evicted block is refused, and the block is lost. The write of a block that is still in host memory is
                refused beyond the sum of this bound and the capacity of host memory.

        Raises:
            InvalidSettings: The folder cannot be used.
        """
        self._fingerprint = fingerprint_key(fingerprint)
        self._max_file_bytes = max_file_bytes
        self._max_pending_bytes = max_pending_bytes
        try:
            self.folder, self._lock = self._claim(folder)
        except OSError as exc:
            raise InvalidSettings(f"--cache-dir (LLAMAQ_CACHE_DIR): {exc}") from exc
        self.background = BackgroundThread("llamaq-disk")
        self._pending: dict[bytes, WriteBlock] = {}
        """Maps the name of a block to its unfinished write. The background thread only reads this and the next dict."""
        self._numbers: dict[bytes, int] = {}
        """Maps the name of a block to the number of its unfinished write."""
        self._n_writes = 0
        self._written: deque[tuple[WriteBlock, bool]] = deque()
        """Writes that the background thread has tried, and whether they succeeded."""
        self._failed: list[Block] = []
        """Blocks that could not be written."""
        self._unreadable: deque[Block] = deque()
        """Blocks whose files the background thread could not read."""
        self._refused: set[Block] = set()
        """Blocks whose write was refused. They have no file to erase."""
        self._is_failing = False
        self._max_host_bytes = 0
        self.pending_bytes = 0

    def rebuild(self, store: BlockStore) -> None:
        """Fill an empty store from the files in the folder, and erase the files that cannot be used."""
        self._max_host_bytes = store.max_host_bytes
        orphans = store.rebuild(self._scan())
        for orphan in orphans:
            self._erase(orphan.name)
        if orphans:
            log.info("disk_cache.orphans_erased files=%d folder=%s", len(orphans), self.folder)
        self.submit(store.drain_disk_operations())
        log.info("disk_cache.restored blocks=%d bytes=%d folder=%s", len(store), store.disk_bytes, self.folder)

    def submit(self, operations: Iterable[DiskOperation], *, is_closing: bool = False) -> None:
        """Start the operations, which are executed in this order.

        Args:
            operations: The operations, in the order in which the store has planned them.
            is_closing: Whether host memory evicts no more blocks. All data that is in host memory is then written.
        """
        self._collect_written()
        for operation in operations:
            self._remove_pending(operation.block.name)
            if isinstance(operation, WriteBlock):
                self._submit_write(operation, is_closing=is_closing)
            elif operation.block in self._refused:
                self._refused.remove(operation.block)
            else:
                self._submit_call(partial(self._erase, operation.block.name))

    @property
    def is_behind(self) -> bool:
        """Whether more than half of `max_pending_bytes` waits to be written."""
        self._collect_written()
        return 2 * self.pending_bytes > self._max_pending_bytes

    def drain_failed_blocks(self) -> list[Block]:
        """Return the blocks whose files could not be written or read since the last call."""
        self._collect_written()
        failed, self._failed = self._failed, []
        while self._unreadable:
            failed.append(self._unreadable.popleft())
        return failed

    def read(self, block: Block) -> Future[SavedCells | None]:
        """Start reading the data of a pinned block. Reads come before writes.

        Returns:
            The verified data. None when the file is missing or invalid; `drain_failed_blocks` then returns the block.
        """
        if write := self._pending.get(block.name):
            done: Future[SavedCells | None] = Future()
            done.set_result(write.data)
            return done
        return self.background.submit(partial(self._read, block), urgent=True)

    def close(self, timeout_s: float) -> None:
        """Finish the started operations within `timeout_s`, stop the thread and unlock the folder."""
        is_done = self.background.close(timeout_s)
        self._collect_written()
        if not is_done:
            log.warning("disk_cache.closed_early files=%d bytes=%d", len(self._pending), self.pending_bytes)
        mark_used(self._lock)
        os.close(self._lock)

    def _submit_write(self, write: WriteBlock, *, is_closing: bool) -> None:
        if self._has_room(write, is_closing=is_closing):
            self._n_writes += 1
            self._pending[write.block.name], self._numbers[write.block.name] = write, self._n_writes
            self.pending_bytes += len(write.data)
            self._submit_call(partial(self._write, write.block.name, self._n_writes))
        else:
            self._warn_of_write("the disk is too slow")
            self._refused.add(write.block)
            self._failed.append(write.block)

    def _has_room(self, write: WriteBlock, *, is_closing: bool) -> bool:
        """Whether the data may stay in memory until it is written. A single write may exceed the bound."""
        max_bytes = self._max_pending_bytes
        if write.block.data is not None:
            if is_closing:
                return True
            # This data needs extra memory only if host memory evicts the block before the write.
            max_bytes += self._max_host_bytes
        return not self._pending or self.pending_bytes + len(write.data) <= max_bytes

    def _submit_call(self, call: Callable[[], None]) -> None:
        """Run a call in the background thread, and log an unexpected exception."""
        self.background.submit(call).add_done_callback(_log_unexpected_exception)

    def _collect_written(self) -> None:
        """Remove finished and failed writes from the pending writes."""
        while self._written:
            write, has_succeeded = self._written.popleft()
            if self._pending.get(write.block.name) is write:  # otherwise the block was erased or written again
                self._remove_pending(write.block.name)
                if not has_succeeded:
                    self._failed.append(write.block)

    def _remove_pending(self, name: bytes) -> None:
        if write := self._pending.pop(name, None):
            self.pending_bytes -= len(write.data)
            del self._numbers[name]

    # ---- in the background thread

    def _write(self, name: bytes, number: int) -> None:
        """Write a file, unless the write with this number is no longer pending. Then its data was freed."""
        write = self._pending.get(name)
        if write is None or self._numbers.get(name) != number:
            return
        block, data = write.block, write.data
        header = encode_header(block, self._fingerprint)
        try:
            self._replace_deleted_folder()
            write_file(self._path(block.name), header, data, checksum(header, data))
        except OSError as exc:
            self._warn_of_write(exc)
            self._written.append((write, False))
        else:
            self._is_failing = False
            self._written.append((write, True))

    def _replace_deleted_folder(self) -> None:
        """Claim a folder again if another program, such as a cleaner of temporary files, has deleted it or its lock.

        Raises:
            OSError: No folder can be used.
        """
        if is_locked_folder(self.folder, self._lock):
            return
        deleted, old_lock = self.folder, self._lock
        self.folder, self._lock = self._claim(deleted.parent)
        os.close(old_lock)
        log.warning("disk_cache.folder_was_deleted folder=%s new=%s", deleted, self.folder)

    def _claim(self, folder: Path) -> tuple[Path, int]:
        """Claim a folder for the blocks within the cache folder. Return it and its lock."""
        return claim_folder(folder, self._fingerprint.hex()[:32])

    def _read(self, block: Block) -> SavedCells | None:
        try:
            with open_file(self._path(block.name)) as file:
                found = read_data(file, block, self._fingerprint)
                with suppress(OSError):
                    os.utime(file.fileno())  # records the use for the LRU order after a restart
        except OSError as exc:
            self._report_unreadable(block, exc)
            return None
        if isinstance(found, Fault):
            self._report_unreadable(block, found)
            return None
        return found

    def _report_unreadable(self, block: Block, reason: object) -> None:
        log.warning("disk_cache.bad_file file=%s reason=%s", self._path(block.name), reason)
        self._unreadable.append(block)

    def _erase(self, name: bytes) -> None:
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("disk_cache.not_erased file=%s error=%s", self._path(name), exc)

    def _warn_of_write(self, reason: object) -> None:
        """Log a warning for a failed write. No further warning is logged until a write has succeeded."""
        if not self._is_failing:
            self._is_failing = True
            log.warning(
                "disk_cache.not_written reason=%s folder=%s: blocks are lost until a write succeeds",
                reason,
                self.folder,
            )

    # ---- at the start

    def _scan(self) -> list[BlockHeader]:
        """Return the headers of all valid files. Erases unfinished, torn and too large files of this format."""
        headers = []
        faults: Counter[Fault] = Counter()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                if path.name.endswith(TEMPORARY):
                    with suppress(OSError):  # a folder of another program, for example
                        path.unlink()
                elif path.name != LOCK:
                    header = self._read_header(path)
                    if isinstance(header, BlockHeader):
                        headers.append(header)
                    else:
                        faults[header] += 1
        for fault, count in faults.items():
            log.warning("disk_cache.ignored reason=%s files=%d folder=%s", fault, count, self.folder)
        return headers

    def _read_header(self, path: Path) -> BlockHeader | Fault:
        match = FILE_NAME.fullmatch(path.name)
        if match is None:
            return Fault.FOREIGN
        name = bytes.fromhex(match[1])
        try:
            with open_file(path) as file:
                header = read_header(file, name, self._fingerprint, self._max_file_bytes)
        except OSError:
            return Fault.UNREADABLE
        if header in _ERASED_FAULTS:
            self._erase(name)
        return header

    def _path(self, name: bytes) -> Path:
        return self.folder / (name.hex() + SUFFIX)

    def __repr__(self) -> str:
        return f"<DiskBlockFiles {self.folder} {len(self._pending)} files to write, {self.pending_bytes} bytes>"


def _log_unexpected_exception(done: Future[None]) -> None:
    """Log the exception of a call, because no other code reads its result."""
    if not done.cancelled() and (defect := done.exception()):
        log.error("disk_cache.defect", exc_info=defect)
