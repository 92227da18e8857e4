"""The interface through which an execution reads and writes its rows. They are stored in files or in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from llamaq.producer.bulk.input_file import FinishedRows, Record


class RowStore(Protocol):
    """The rows of a run: the input, and the lines that were written."""

    n_rows: int
    """Number of rows of the input."""
    finished: FinishedRows
    """Rows that have a line in the output or among the errors."""
    n_failed: int
    """Number of rows that have an error."""

    def records(self, max_line_bytes: int) -> AsyncIterator[Record]:
        """Yield the records of the input that are not finished.

        Args:
            max_line_bytes: Longest line of a JSONL file.

        Raises:
            BulkRunRefused: The input cannot be read.
        """

    def add_answer(self, number: int, line: bytes) -> None:
        """Add the line of a row with a result. `flush` stores it."""

    def add_error(self, number: int, line: bytes) -> None:
        """Add the line of a row that has failed. `flush` stores it."""

    async def flush(self) -> None:
        """Store the lines: they survive the end of this process, also a crash."""
