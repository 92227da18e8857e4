"""A disk tier for tests, and the warnings that it logs."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.saved_cells import SavedCells
from llamaq.worker.kv_cache.blocks.block import Block
from llamaq.worker.kv_cache.blocks.block_store import BlockStore
from llamaq.worker.offload.disk_block_files import DiskBlockFiles

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

    def read(self, tokens: Sequence[int], scope: Scope = SCOPE) -> list[SavedCells | None]:
        return [self.files.read(block).result(LIMIT_S) for block in self.blocks(tokens, scope)]

    def flush(self) -> None:
        assert self.files.background.flush(LIMIT_S)
        self.mark_lost_files()

    def mark_lost_files(self) -> None:
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


class Warnings:
    """The messages that were logged at level WARNING or ERROR."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        return iter([each.getMessage() for each in self._caplog.records if each.levelno >= logging.WARNING])
