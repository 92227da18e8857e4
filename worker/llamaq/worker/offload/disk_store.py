"""The prefix cache's disk tier, done: one file a block, written, read and erased by one background thread.

    <folder>/<hash of the fingerprint>/<name of the block>.kv

A process has such a folder to itself, by a lock; a second worker of the same model takes `<hash>.1`. Files appear
by a rename, so a process that dies leaves none half written. They are not synced: after a power failure some may be
torn, and a cache that is lost then costs less than one that waits for the disk. What is read is verified first.
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
from llamaq.worker.core.kv_data import Data
from llamaq.worker.kv_cache.blocks.block import Block, DiskOperation, StoredBlock, Write
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.offload.atomic_files import LOCK, TEMPORARY, claim_folder, open_file, write_file
from llamaq.worker.offload.background_thread import BackgroundThread
from llamaq.worker.offload.disk_format import Fault, block_header, checksum, fingerprint_key, read_data, read_header

log = logging.getLogger(__name__)

SUFFIX = ".kv"
MAX_PENDING_BYTES = 256 * 1024**2
_FILE_NAME = re.compile(r"([0-9a-f]{64})\.kv")
_USELESS = frozenset({Fault.TORN, Fault.TOO_LARGE})


class DiskStore:
    """The files of one `BlockStore`. All methods are for the engine thread and do not wait for the disk, but for
    `restore`, `flush` and `close`.

    `fingerprint` says for which model, settings and llama.cpp the data is good. Files over `max_file_bytes` are not
    used. What memory has given up and is not yet written takes at most `max_pending_bytes`; what exceeds it is lost.
    """

    def __init__(
        self, folder: Path, fingerprint: str, *, max_file_bytes: int, max_pending_bytes: int = MAX_PENDING_BYTES
    ) -> None:
        self._fingerprint = fingerprint_key(fingerprint)
        self._max_file_bytes = max_file_bytes
        self._max_pending_bytes = max_pending_bytes
        try:
            self.folder, self._lock = claim_folder(folder, self._fingerprint.hex()[:32])
        except OSError as exc:
            raise InvalidSettings(f"--cache-dir (LLAMAQ_CACHE_DIR): {exc}") from exc
        self.background = BackgroundThread("llamaq-disk")
        self._pending: dict[bytes, Write] = {}
        """What is still to be written, by the blocks' names; the thread only looks at it."""
        self._written: deque[tuple[Write, bool]] = deque()
        """From the thread: what it has tried to write, and whether that went well."""
        self._failed: list[Block] = []
        self._bad: deque[Block] = deque()
        """From the thread: whose files could not be read."""
        self._is_failing = False
        self.pending_bytes = 0

    def restore(self, tree: BlockStore) -> None:
        """Bring the empty tree to what lies on disk, and remove what is of no use. Waits for the disk."""
        orphans = tree.restore(self._scan())
        for orphan in orphans:
            self._unlink(orphan.name)
        if orphans:
            log.info("disk_cache.orphans_erased files=%d folder=%s", len(orphans), self.folder)
        self.carry_out(tree.take_orders())
        log.info("disk_cache.restored blocks=%d bytes=%d folder=%s", len(tree), tree.disk_bytes, self.folder)

    def carry_out(self, orders: Iterable[DiskOperation]) -> None:
        """Start to write and erase, in this order."""
        self._settle_writes()
        for order in orders:
            self._forget_pending(order.block.name)
            if isinstance(order, Write):
                self._start_write(order)
            else:
                self._start(partial(self._unlink, order.block.name))

    def failures(self) -> list[Block]:
        """Blocks whose files could not be written, or read, since the last call: they are lost to the tree."""
        self._settle_writes()
        failed, self._failed = self._failed, []
        while self._bad:
            failed.append(self._bad.popleft())
        return failed

    def read(self, block: Block) -> Future[Data | None]:
        """The block's data, verified, or None when its file is not good, which `failures` tells too.

        Reads go before writes. The block is to be pinned meanwhile.
        """
        if order := self._pending.get(block.name):
            done: Future[Data | None] = Future()
            done.set_result(order.data)
            return done
        return self.background.submit(partial(self._read, block), urgent=True)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was started is done; False when the time was too short."""
        return self.background.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Do what is left, within the time, and stop."""
        is_done = self.background.close(timeout_s)
        self._settle_writes()
        if not is_done:
            log.warning("disk_cache.closed_early files=%d bytes=%d", len(self._pending), self.pending_bytes)
        os.close(self._lock)

    def _start_write(self, order: Write) -> None:
        size = len(order.data)
        # What memory still has costs nothing more, and a single one may be large.
        if order.block.data is None and self._pending and self.pending_bytes + size > self._max_pending_bytes:
            self._warn_of_write("the disk is too slow")
            self._failed.append(order.block)
        else:
            self._pending[order.block.name] = order
            self.pending_bytes += size
            self._start(partial(self._write, order))

    def _start(self, work: Callable[[], None]) -> None:
        """Have work done that nobody waits for."""
        self.background.submit(work).add_done_callback(_report_defect)

    def _settle_writes(self) -> None:
        while self._written:
            order, is_good = self._written.popleft()
            if self._pending.get(order.block.name) is order:  # else it was erased or ordered anew since
                self._forget_pending(order.block.name)
                if not is_good:
                    self._failed.append(order.block)

    def _forget_pending(self, name: bytes) -> None:
        if order := self._pending.pop(name, None):
            self.pending_bytes -= len(order.data)

    # -- in the thread

    def _write(self, order: Write) -> None:
        block, data = order.block, order.data
        if self._pending.get(block.name) is not order:
            return
        header = block_header(block, self._fingerprint)
        try:
            write_file(self._path(block.name), header, data, checksum(header, data))
        except OSError as exc:
            self._warn_of_write(exc)
            self._written.append((order, False))
        else:
            self._is_failing = False
            self._written.append((order, True))

    def _read(self, block: Block) -> Data | None:
        try:
            with open_file(self._path(block.name)) as file:
                found = read_data(file, block, self._fingerprint)
                with suppress(OSError):
                    os.utime(file.fileno())  # the next start sees what was used last
        except OSError as exc:
            self._report_bad(block, exc)
            return None
        if isinstance(found, Fault):
            self._report_bad(block, found)
            return None
        return found

    def _report_bad(self, block: Block, reason: object) -> None:
        log.warning("disk_cache.bad_file file=%s reason=%s", self._path(block.name), reason)
        self._bad.append(block)

    def _unlink(self, name: bytes) -> None:
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("disk_cache.not_erased file=%s error=%s", self._path(name), exc)

    def _warn_of_write(self, reason: object) -> None:
        """Once until a write succeeds again."""
        if not self._is_failing:
            self._is_failing = True
            log.warning(
                "disk_cache.not_written reason=%s folder=%s: blocks are lost until this ends", reason, self.folder
            )

    # -- at start-up

    def _scan(self) -> list[StoredBlock]:
        """What the headers of all good files say. Unfinished and useless files of ours go, others stay."""
        found = []
        faults: Counter[Fault] = Counter()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                if path.name.endswith(TEMPORARY):
                    path.unlink(missing_ok=True)
                elif path.name != LOCK:
                    stored = self._look_at(path)
                    if isinstance(stored, StoredBlock):
                        found.append(stored)
                    else:
                        faults[stored] += 1
        for fault, count in faults.items():
            log.warning("disk_cache.ignored reason=%s files=%d folder=%s", fault, count, self.folder)
        return found

    def _look_at(self, path: Path) -> StoredBlock | Fault:
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            return Fault.FOREIGN
        name = bytes.fromhex(match[1])
        try:
            with open_file(path) as file:
                stored = read_header(file, name, self._fingerprint, self._max_file_bytes)
        except OSError:
            return Fault.UNREADABLE
        if stored in _USELESS:
            self._unlink(name)
        return stored

    def _path(self, name: bytes) -> Path:
        return self.folder / (name.hex() + SUFFIX)

    def __repr__(self) -> str:
        return f"<DiskStore {self.folder} {len(self._pending)} files to write, {self.pending_bytes} bytes>"


def _report_defect(done: Future[None]) -> None:
    """What nobody waits for must not fail in silence."""
    if not done.cancelled() and (defect := done.exception()):
        log.error("disk_cache.defect", exc_info=defect)
