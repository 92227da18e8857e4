"""Executes a bulk run: reads rows, computes them in a window of jobs, and writes each answer once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
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
from llamaq.producer.bulk.bulk_run import BulkProgress, BulkRun, BulkState
from llamaq.producer.bulk.input_file import READ_ERRORS, read_records
from llamaq.producer.bulk.meter import Meter
from llamaq.producer.bulk.output_files import OutputFiles, open_output
from llamaq.producer.bulk.row import Row, read_row
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


async def execute(
    run: BulkRun, client: AsyncClient, *, on_progress: OnProgress | None = None, stop: asyncio.Event | None = None
) -> BulkProgress:
    """Execute a run, or continue it, until all rows have an answer or an error.

    A full queue, a full Redis and a Redis that does not answer slow the run down: no row fails because of them.
    If this call is cancelled or the process dies, another call with the same run continues it. Jobs in flight are
    cancelled when the call ends early.

    Args:
        run: The description of the run.
        client: The client of the queue. Its `result_ttl_s` should be longer than an interruption of the run: rows whose
            result has expired are computed again.
        on_progress: Called in the event loop with the progress, about twice a second and at the end. It must not block.
        stop: When it is set, the run stops.

    Returns:
        The progress at the end. `state` tells whether the run is complete, and otherwise why it ended.

    Raises:
        BulkRunRefused: The run cannot begin: there is no input, the output is of another run, the input or the
            parameters have changed since the run began, or another process executes it.
        InvalidSettings: The workers of the queue have another number of partitions.
        RedisError: Redis cannot be reached at the start, or refuses the commands.
    """
    await client.redis.ping()  # a wrong URL is an error now, a lost connection later is not
    with ExitStack() as exits:
        files = await asyncio.to_thread(exits.enter_context, open_output(run))  # it may read the whole input
        execution = _Execution(run, client, files)
        return await execution.run_until_end(on_progress or _ignore, stop or asyncio.Event())


def drop_errors(run: BulkRun) -> int:
    """Delete the error file of a run, so that the next `execute` computes those rows again.

    Returns:
        The number of rows in the file.

    Raises:
        BulkRunRefused: A process executes the run.
    """
    with open_output(run) as files:
        n_failed = files.n_failed
        run.error_file.unlink(missing_ok=True)
        return n_failed


def _ignore(_: BulkProgress) -> None:
    """Do nothing."""


class _Execution:
    """One process that executes a run."""

    def __init__(self, run: BulkRun, client: AsyncClient, files: OutputFiles) -> None:
        self._run = run
        self._client = client
        self._files = files
        self._meter = Meter(
            run.run_id, time.monotonic, rows_total=files.stored.input.n_rows, rows_before=len(files.finished)
        )
        self._options = translate(run.options)

    async def run_until_end(self, on_progress: OnProgress, stop: asyncio.Event) -> BulkProgress:
        """Compute all rows that are not finished."""
        n_slots = sum(worker.card.n_parallel for worker in await self._client.workers())
        size = self._run.window or default_size(n_slots)
        async with JobWindow[Row](self._client.connection, size=size, rate=self._run.rate) as window:
            reading, stopping = asyncio.create_task(self._read_rows(window)), asyncio.create_task(stop.wait())
            try:
                state = await self._write_until_end(window, reading, stopping, on_progress)
            finally:
                await cancel_tasks(reading, stopping)
                self._files.flush()
        if state is BulkState.COMPLETED:
            await asyncio.to_thread(self._files.complete)
        progress = self._meter.report(state, rows_failed=self._files.n_failed)
        on_progress(progress)
        return progress

    async def _write_until_end(
        self, window: JobWindow[Row], reading: asyncio.Task[Any], stopping: asyncio.Task[Any], on_progress: OnProgress
    ) -> BulkState:
        """Write the outcomes of rows until the run ends, and report the progress."""
        report_s, ended_s = 0.0, time.monotonic()
        notice: str | None = None
        while (state := self._state(window, reading, stopping)) is BulkState.RUNNING:
            outcomes = await window.outcomes(LOOK_S)
            written = [(row.number, job_id) for row, outcome in outcomes if (job_id := self._write(row, outcome))]
            self._files.flush()
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
                        rows_failed=self._files.n_failed,
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
            try:
                reading.result()
            except READ_ERRORS as exc:
                raise BulkRunRefused(f"{self._run.input} cannot be read: {exc}") from exc
            if not window.n_held:
                return BulkState.COMPLETED
        if stopping.done():
            return BulkState.STOPPED
        if self._run.deadline is not None and datetime.now(UTC) >= self._run.deadline:
            return BulkState.DEADLINE
        if self._run.max_errors is not None and self._files.n_failed > self._run.max_errors:
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
            self._files.add_error(row.number, error_line(self._run, row, error))
        elif isinstance(outcome, Result):
            line = answer_line(self._run, row, outcome, queue=self._client.queue, now_s=int(time.time()))
            self._files.add_answer(row.number, line)
        self._meter.count(outcome.stats if isinstance(outcome, Result) else None)
        return outcome.job_id if isinstance(outcome, Result | JobFailed) else None

    async def _read_rows(self, window: JobWindow[Row]) -> None:
        """Read the input as the window has room, until its end."""
        for count, row in enumerate(self._rows(), start=1):
            await window.wait_for_room()
            try:
                window.add(row, await self._build_request(row))
            except InvalidRequest as exc:
                window.add_outcome(row, InvalidRequest(f"line {row.number}: {exc}"))
            if count % ROWS_PER_YIELD == 0:
                await asyncio.sleep(0)

    def _rows(self) -> Iterator[Row]:
        max_line_bytes = 4 * self._client.settings.max_request_bytes
        for number, record in read_records(self._run.input, self._files.finished, max_line_bytes):
            if isinstance(record, InvalidRequest):
                yield Row(number, form=self._run.form_of("plain"), error=record)
            else:
                yield read_row(self._run, number, record)

    async def _build_request(self, row: Row) -> JobRequest:
        """Return the request of a row. A row without a seed has one that depends on the run and the row alone.

        Raises:
            InvalidRequest: The row is not a request.
        """
        if row.error is not None:
            raise row.error
        options: Any = {
            **self._options,
            **translate(row.values),
            "priority": self._run.priority,
            "stream": False,
            "idempotency_key": row_key(self._run.run_id, row.number),
        }
        request = await build_request(options)
        if request.has_random_seed:
            digest = sha256(row_key(self._run.run_id, row.number).encode()).digest()
            request = request.model_copy(update={"seed": int.from_bytes(digest[:8]) >> (64 - SEED_BITS)})
        return request
