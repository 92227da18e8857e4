"""The process of a bulk run, wherever its rows are stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.cancel_tasks import cancel_tasks
from llamaq.common.errors import BulkRunRefused, IdempotencyConflict, InvalidRequest, JobFailed, NoWorker
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.accepted_forms import translate
from llamaq.producer.bulk.answer import answer_line, error_line, error_of
from llamaq.producer.bulk.bulk_run import BulkProgress, BulkState, RunParameters
from llamaq.producer.bulk.meter import Meter
from llamaq.producer.bulk.row import Row, read_row
from llamaq.producer.bulk.row_store import RowStore
from llamaq.producer.bulk.stored_results import delete_results, row_key
from llamaq.producer.client import AsyncClient
from llamaq.producer.job_window.window import JobWindow, Outcome, default_size
from llamaq.producer.submission import SEED_BITS, build_request

LOOK_S = 0.1
"""Longest time until a stop, a deadline or the end of the input is noticed."""
REPORT_S = 0.5
"""Time between two reports of the progress."""
SILENCE_S = 5.0
"""After this time without the end of a row, the run looks whether a worker serves the queue."""
ROWS_PER_YIELD = 50
"""After this many rows were read, other tasks of the event loop run."""

OnProgress = Callable[[BulkProgress], object]
ReadRow = Callable[[RunParameters, int, object], Row]
Decide = Callable[[dict[str, Any]], dict[str, Any]]


class Execution:
    """One process that executes a run: reads rows, computes them in a window of jobs, writes each answer once."""

    def __init__(
        self,
        run: RunParameters,
        client: AsyncClient,
        rows: RowStore,
        *,
        read: ReadRow = read_row,
        decide: Decide | None = None,
        keeps_jobs: bool = False,
    ) -> None:
        """Prepare an execution.

        Args:
            run: The parameters of the run.
            client: The client of the queue.
            rows: The rows of the run.
            read: Returns the row of a record.
            decide: Returns the job options of a row, from those that the row and the run ask for. None: these.
            keeps_jobs: Whether jobs continue if the execution is interrupted, because another process continues the
                run, also one of another version that submits other requests for the same rows. Otherwise they are
                cancelled. The jobs of a run that has stopped are always cancelled.
        """
        self._run = run
        self._client = client
        self._rows = rows
        self._read = read
        self._decide = decide
        self._keeps_jobs = keeps_jobs
        self._meter = Meter(run.run_id, time.monotonic, rows_total=rows.n_rows, rows_before=len(rows.finished))
        self._options = translate(run.options)

    def __repr__(self) -> str:
        return f"<Execution {self._run.run_id} finished={len(self._rows.finished)} of {self._rows.n_rows}>"

    async def run_until_end(self, on_progress: OnProgress, stop: asyncio.Event) -> BulkState:
        """Compute all rows that are not finished. Return how the run has ended.

        Raises:
            BulkRunRefused: The input cannot be read, or the rows cannot be written.
            InvalidSettings: The workers of the queue have another number of partitions.
            RedisError: Redis refuses the commands.
        """
        n_slots = sum(worker.card.n_parallel for worker in await self._client.workers())
        size = self._run.window or default_size(n_slots)
        async with JobWindow[Row](
            self._client.connection, size=size, rate=self._run.rate, replaces_conflicts=self._keeps_jobs
        ) as window:
            reading, stopping = asyncio.create_task(self._read_rows(window)), asyncio.create_task(stop.wait())
            try:
                return await self._write_until_end(window, reading, stopping, on_progress)
            except BaseException:
                if self._keeps_jobs:
                    window.keep_jobs()
                raise
            finally:
                await cancel_tasks(reading, stopping)
                await self._rows.flush()

    def progress(self, state: BulkState) -> BulkProgress:
        """Return the progress at the end of the execution."""
        return self._meter.report(state, rows_failed=self._rows.n_failed)

    async def _write_until_end(
        self, window: JobWindow[Row], reading: asyncio.Task[Any], stopping: asyncio.Task[Any], on_progress: OnProgress
    ) -> BulkState:
        """Write the outcomes of rows until the run ends, and report the progress."""
        report_s, ended_s = 0.0, time.monotonic()
        notice: str | None = None
        while (state := self._state(window, reading, stopping)) is BulkState.RUNNING:
            outcomes = await window.outcomes(LOOK_S)
            written = [(row.number, job_id) for row, outcome in outcomes if (job_id := self._write(row, outcome))]
            await self._rows.flush()
            window.release(len(outcomes))
            if written:
                await delete_results(self._client.connection, self._run.run_id, written)
            now_s = time.monotonic()
            if outcomes:
                ended_s, notice = now_s, None
            elif now_s - ended_s >= SILENCE_S:
                ended_s, notice = now_s, await self._find_problem()
            if now_s - report_s >= REPORT_S:
                report_s = now_s
                on_progress(
                    self._meter.report(
                        state,
                        rows_failed=self._rows.n_failed,
                        rows_in_flight=window.n_in_flight,
                        notice=window.problem or notice,
                    )
                )
        return state

    async def _find_problem(self) -> str | None:
        """Return that no worker serves the queue. None: one does, or Redis does not answer."""
        with suppress(RedisError, OSError):
            return None if await self._client.workers() else str(NoWorker(self._client.queue))
        return None

    def _state(self, window: JobWindow[Row], reading: asyncio.Task[Any], stopping: asyncio.Task[Any]) -> BulkState:
        if reading.done():
            reading.result()
            if not window.n_held:
                return BulkState.COMPLETED
        if stopping.done():
            return BulkState.STOPPED
        if self._run.deadline is not None and datetime.now(UTC) >= self._run.deadline:
            return BulkState.DEADLINE
        if self._run.max_errors is not None and self._rows.n_failed > self._run.max_errors:
            return BulkState.TOO_MANY_ERRORS
        return BulkState.RUNNING

    def _write(self, row: Row, outcome: Outcome) -> str | None:
        """Write the line of a row, and return the id of its job. None: it has none."""
        if isinstance(outcome, IdempotencyConflict):
            raise BulkRunRefused(
                f"run {self._run.run_id}: a job of this id has another request: use another run id, or another queue"
            )
        error = error_of(outcome)
        if error is not None:
            self._rows.add_error(row.number, error_line(self._run, row, error))
        elif isinstance(outcome, Result):
            line = answer_line(self._run, row, outcome, queue=self._client.queue, now_s=int(time.time()))
            self._rows.add_answer(row.number, line, outcome.stats)
        self._meter.count(outcome.stats if isinstance(outcome, Result) else None)
        return outcome.job_id if isinstance(outcome, Result | JobFailed) else None

    async def _read_rows(self, window: JobWindow[Row]) -> None:
        """Read the input as the window has room, until its end."""
        count, max_line_bytes = 0, 4 * self._client.settings.max_request_bytes
        async for number, record in self._rows.records(max_line_bytes):
            row = self._row_of(number, record)
            await window.wait_for_room()
            try:
                window.add(row, await self._build_request(row))
            except InvalidRequest as exc:
                window.add_outcome(row, InvalidRequest(f"line {row.number}: {exc}"))
            count += 1
            if count % ROWS_PER_YIELD == 0:
                await asyncio.sleep(0)

    def _row_of(self, number: int, record: object) -> Row:
        if isinstance(record, InvalidRequest):
            return Row(number, form=self._run.form_of("plain"), error=record)
        return self._read(self._run, number, record)

    async def _build_request(self, row: Row) -> JobRequest:
        """Return the request of a row. A row without a seed has one that depends on the run and the row alone.

        Raises:
            InvalidRequest: The row is not a request.
        """
        if row.error is not None:
            raise row.error
        options: Any = {**self._options, **translate(row.values)}
        if self._decide is not None:
            options = self._decide(options)
        options |= {
            "priority": self._run.priority,
            "stream": False,
            "idempotency_key": row_key(self._run.run_id, row.number),
        }
        request = await build_request(options)
        if request.has_random_seed:
            digest = sha256(row_key(self._run.run_id, row.number).encode()).digest()
            request = request.model_copy(update={"seed": int.from_bytes(digest[:8]) >> (64 - SEED_BITS)})
        return request
