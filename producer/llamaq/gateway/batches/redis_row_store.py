"""The rows of a batch in Redis: the lines of its input file and of its output files."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

from redis.exceptions import RedisError

from llamaq.common.backoff import Backoff
from llamaq.common.errors import BulkRunRefused, InvalidRequest
from llamaq.gateway.batches.input_lines import decode_record, read_lines
from llamaq.gateway.batches.record import TOKEN_COUNTERS, Batch
from llamaq.gateway.batches.store import BatchStore
from llamaq.gateway.files.blocks import compress, read_blocks
from llamaq.producer.bulk.input_file import ROWS_PER_YIELD, FinishedRows, Record
from llamaq.producer.bulk.output_lines import row_number_of
from llamaq.producer.streaming.retried_reads import is_temporary

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses while Redis is full or does not answer."""
LONGEST_LINE_BYTES = 1 << 40
"""No bound: the lines of the output were written by this package."""


class RedisRowStore:
    """The rows of a batch that this server runs. It is the `RowStore` of its execution."""

    def __init__(self, store: BatchStore, batch: Batch, runner: str) -> None:
        """Use `open` instead."""
        self._store = store
        self._request = batch.request
        self._runner = runner
        self._n_writes = batch.number("writes")
        self._output: list[bytes] = []
        self._errors: list[bytes] = []
        self._counters: Counter[str] = Counter()
        self._usages: dict[int, Mapping[str, Any]] = {}
        self.n_rows = batch.number("total")
        self.n_failed = batch.number("failed")
        self.finished = FinishedRows()

    def __repr__(self) -> str:
        return f"<RedisRowStore {self._request.id} finished={len(self.finished)} of {self.n_rows}>"

    @classmethod
    async def open(cls, store: BatchStore, batch: Batch, runner: str) -> Self:
        """Return the rows of a batch, and read which of them have a line in the output or among the errors."""
        rows = cls(store, batch, runner)
        for file_id in (batch.request.output_file_id, batch.request.error_file_id):
            blocks = read_blocks(store.redis, store.keys.http_file(file_id))
            async for _, line in read_lines(blocks, LONGEST_LINE_BYTES):
                rows.finished.add(row_number_of(line or b"", file_id))
        return rows

    async def records(self, max_line_bytes: int) -> AsyncIterator[Record]:
        """Yield the records of the input that are not finished.

        Args:
            max_line_bytes: Longest line.

        Raises:
            BulkRunRefused: The file was deleted.
        """
        n_read = 0
        blocks = read_blocks(self._store.redis, self._store.keys.http_file(self._request.input_file_id))
        async for number, line in read_lines(blocks, max_line_bytes):
            n_read += 1
            if n_read % ROWS_PER_YIELD == 0:
                await asyncio.sleep(0)
            if number in self.finished:
                continue
            if line is None:
                yield number, InvalidRequest(f"the line is longer than {max_line_bytes} bytes")
            else:
                yield number, decode_record(line)
        if n_read != self.n_rows:
            raise BulkRunRefused(f"the input file {self._request.input_file_id} was deleted before its end was read")

    def add_usage(self, number: int, usage: Mapping[str, Any]) -> None:
        """Remember the `usage` of a row until `add_answer`, so that its line need not be decoded."""
        self._usages[number] = usage

    def add_answer(self, number: int, line: bytes) -> None:
        """Add the line of a row with a result. `flush` stores it."""
        self._output.append(line)
        self.finished.add(number)
        tokens = _tokens_of(self._usages.pop(number))
        self._counters += Counter(completed=1, output_bytes=len(line), **tokens)

    def add_error(self, number: int, line: bytes) -> None:
        """Add the line of a row that has failed. `flush` stores it."""
        self._errors.append(line)
        self.finished.add(number)
        self._usages.pop(number, None)
        self.n_failed += 1
        self._counters += Counter(failed=1, error_bytes=len(line))

    async def flush(self) -> None:
        """Store the lines. A Redis that is full or does not answer delays this.

        Raises:
            LeaseLost: Another server runs the batch.
            RedisError: Redis refuses the command.
        """
        if not self._output and not self._errors:
            return
        output, errors = [await compress(b"".join(lines)) for lines in (self._output, self._errors)]
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await self._store.write(
                    self._request,
                    self._runner,
                    n_before=self._n_writes,
                    output=output,
                    errors=errors,
                    counters=self._counters,
                )
            except (RedisError, OSError) as exc:
                if not is_temporary(exc):
                    raise
                log.warning("batch.write_delayed id=%s error=%s", self._request.id, exc)
                await asyncio.sleep(pauses.next_delay_s())
            else:
                break
        self._n_writes += 1
        self._output, self._errors = [], []
        self._counters.clear()


def _tokens_of(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of tokens in a `usage`. The endpoints name its fields differently."""
    sent = "input_tokens" if "input_tokens" in usage else "prompt_tokens"
    made = "output_tokens" if "output_tokens" in usage else "completion_tokens"
    details = usage.get(f"{sent}_details", {}) | usage.get(f"{made}_details", {})
    tokens = {"input_tokens": usage[sent], "output_tokens": usage.get(made, 0), **details}
    return {name: tokens.get(name, 0) for name in TOKEN_COUNTERS}
