"""The interface between `BlockTransfers` and the disk tier."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

from llamaq.worker.core.saved_cells import SavedCells
from llamaq.worker.kv_cache.blocks.block import Block, DiskOperation


class BlockFiles(Protocol):
    """The disk tier. Only `close` waits for the disk."""

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that blocks may soon be lost."""

    def submit(self, operations: Iterable[DiskOperation], *, is_closing: bool = False) -> None:
        """Start the operations, which are executed in this order.

        Args:
            operations: The operations, in the order in which the store has planned them.
            is_closing: Whether host memory evicts no more blocks. All data that is in host memory is then written.
        """

    def read(self, block: Block) -> Future[SavedCells | None]:
        """Start reading the data of the block. The result is None when the file of the block is invalid."""

    def drain_failed_blocks(self) -> list[Block]:
        """Return the blocks whose files could not be written or read since the last call."""

    def close(self, timeout_s: float) -> None:
        """Finish the submitted operations within about `timeout_s`, and stop the thread."""


class NoBlockFiles:
    """Replaces the disk tier when there is none."""

    is_behind = False

    def submit(self, operations: Iterable[DiskOperation], *, is_closing: bool = False) -> None:
        """Do nothing: without a disk there are no operations."""

    def read(self, block: Block) -> Future[SavedCells | None]:
        raise LookupError(f"{block!r} has no file")

    def drain_failed_blocks(self) -> list[Block]:
        return []

    def close(self, timeout_s: float) -> None:
        """Do nothing."""
