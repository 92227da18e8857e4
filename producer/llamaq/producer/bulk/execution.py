"""The execution of a bulk run. Its rows may be stored in files or in Redis."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Protocol

from redis.exceptions import RedisError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.backoff import Backoff
from llamaq.common.errors import (
    BulkRunRefused,
    ErrorCode,
    IdempotencyConflict,
    InvalidRequest,
    JobFailed,
    LlamaqError,
    NoWorker,
    ResultTimeout,
    SlotCommandRefused,
)
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.queue_config import QueueMode
from llamaq.producer.bulk.input_file import FinishedRows, Record, UnreadRow
from llamaq.producer.bulk.input_row import Row, read_row, row_key, unread_row
from llamaq.producer.bulk.meter import Meter
from llamaq.producer.bulk.output_lines import answer_line, error_line, error_of
from llamaq.producer.bulk.result_deletion import delete_results
from llamaq.producer.bulk.run_description import BulkProgress, BulkState, RunParameters
from llamaq.producer.client import AsyncClient
from llamaq.producer.job_window.outcome_queue import Outcome
from llamaq.producer.job_window.window import JobWindow, default_size
from llamaq.producer.option_synonyms import translate
from llamaq.producer.streaming.retried_reads import is_temporary
from llamaq.producer.submission import SEED_BITS, build_request

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Longest time until a stop, a deadline or the end of the input is noticed."""
REPORT_S = 0.5
"""Time between two reports."""
SILENCE_S = 5.0
"""If no row ends within this time, the run checks whether a worker serves the queue."""
LONGEST_PAUSE_S = 5.0
"""Longest pause before a row is read again that needs a reply of a worker, while no worker replies."""
DEAD = frozenset({ErrorCode.POISON, ErrorCode.DAMAGED})
"""The errors of rows whose jobs are kept as dead letters. Those that are dead after retries may be too many."""

OnProgress = Callable[[BulkProgress], object]
ReadRow = Callable[[RunParameters, int, object], Awaitable[Row]]
Decide = Callable[[dict[str, Any]], dict[str, Any]]
CheckStop = Callable[[], Awaitable[bool]]


class RowStore(Protocol):
    """The rows of a run: the input, and the lines that were written."""

    n_rows: int
    """Number of rows of the input."""
    finished: FinishedRows
    """Rows that have a line in the output or among the errors."""
    n_failed: int
    """Number of rows that have an error."""

    def records(self, max_line_bytes: int) -> AsyncIterator[Record]:
        """Yield the records of the input that are not finished. Other tasks of the event loop run meanwhile.

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


def is_outage(error: Exception) -> bool:
    """Return whether an error is caused by the current state of the workers or of Redis, and not by the row."""
    if isinstance(error, NoWorker | ResultTimeout | SlotCommandRefused):
        return True
    return isinstance(error, RedisError | OSError) and is_temporary(error)


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row whose line is not written yet."""

    row: Row
    n_jobs: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """The outcomes of its jobs so far, by their places in `row.jobs`."""

    @property
    def was_cancelled(self) -> bool:
        """Whether one of its jobs was cancelled."""
        return any(
            isinstance(outcome, Result) and outcome.finish_reason is FinishReason.CANCELLED
            for outcome in self.outcomes.values()
        )

    def results(self) -> list[Result]:
        """Return the results of all jobs.

        Raises:
            LlamaqError: Why the row has failed.
            Exception: An outcome is an error that the row has not caused.
        """
        results: list[Result] = []
        for _, outcome in sorted(self.outcomes.items()):
            error = error_of(outcome)
            if error is not None:
                raise error
            if isinstance(outcome, Result):
                results.append(outcome)
        return results


Window = JobWindow[tuple[OpenRow, int]]


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
        check_stop: CheckStop | None = None,
        keeps_jobs: bool = False,
    ) -> None:
        """Prepare an execution.

        Args:
            run: The parameters of the run.
            client: The client of the queue.
            rows: The rows of the run.
            read: Returns the row of a record. It is called again later if it needs a worker and none has replied.
            decide: Returns the job options of a row, given the options that the row and the run ask for. None: the
                given options are used.
            check_stop: Called before the error of a cancelled row is written. It returns whether the run was stopped,
                and has set `stop` then. The row is left open, so that it is computed again when the run continues.
                None: a cancelled row has failed.
            keeps_jobs: Whether jobs continue if the execution is interrupted, because another process, perhaps of
                another version, continues the run. The jobs of a run that has stopped are always cancelled.
        """
        self._run = run
        self._client = client
        self._rows = rows
        self._read = read
        self._decide = decide
        self._check_stop = check_stop
        self._keeps_jobs = keeps_jobs
        self._meter = Meter(run.run_id, time.monotonic, rows_total=rows.n_rows, rows_before=len(rows.finished))
        self._options = translate(run.options)
        self._n_failed_before = rows.n_failed
        self._ended: deque[OpenRow] = deque()
        """Rows whose jobs have ended, and whose lines are not written."""

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
        async with Window(
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
        self, window: Window, reading: asyncio.Task[Any], stopping: asyncio.Task[Any], on_progress: OnProgress
    ) -> BulkState:
        """Write the outcomes of rows until the run ends, and report the progress."""
        report_s, ended_s = 0.0, time.monotonic()
        notice: str | None = None
        while (state := self._state(window, reading, stopping)) is BulkState.RUNNING:
            n_outcomes = await self._collect(window)
            written = await self._write_ended()
            await self._rows.flush()
            if written:
                await delete_results(self._client.connection, written)
            now_s = time.monotonic()
            if n_outcomes or written:
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

    async def _collect(self, window: Window) -> int:
        """Take outcomes from the window, and return their number. While rows wait to be written, no outcomes are
        taken.
        """
        if self._ended:
            await asyncio.sleep(LOOK_S)
            return 0
        outcomes = await window.outcomes(LOOK_S)
        for (open_row, index), outcome in outcomes:
            open_row.outcomes[index] = outcome
            if len(open_row.outcomes) == open_row.n_jobs:
                self._ended.append(open_row)
        window.release(len(outcomes))
        return len(outcomes)

    async def _write_ended(self) -> list[tuple[str, str, bool]]:
        """Write the lines of the rows whose jobs have ended. Return these jobs for `delete_results`.

        A row whose answer needs a worker, while none replies, is written later.
        """
        written: list[tuple[str, str, bool]] = []
        while self._ended:
            open_row = self._ended[0]
            try:
                if open_row.was_cancelled and self._check_stop is not None and await self._check_stop():
                    break
                await self._write(open_row)
            except (LlamaqError, RedisError, OSError) as exc:
                if not is_outage(exc):
                    raise
                log.info("bulk.answer_delayed run=%s row=%d error=%s", self._run.run_id, open_row.row.number, exc)
                break
            self._ended.popleft()
            for index, outcome in open_row.outcomes.items():
                if isinstance(outcome, Result | JobFailed) and outcome.job_id:
                    key = row_key(self._run.run_id, open_row.row.number, index)
                    is_dead = isinstance(outcome, JobFailed) and outcome.code in DEAD
                    written.append((key, outcome.job_id, is_dead))
        return written

    async def _find_problem(self) -> str | None:
        """Return a message if no worker serves the queue, or if it is paused. None: no problem was found."""
        queue = self._client.queue
        with suppress(LlamaqError, RedisError, OSError):
            if not await self._client.workers():
                return str(NoWorker(queue))
            if (await self._client.queue_depth()).mode is QueueMode.PAUSED:
                return f"queue {queue!r} is paused; continue with: llamaq resume --queue {queue}"
        return None

    def _state(self, window: Window, reading: asyncio.Task[Any], stopping: asyncio.Task[Any]) -> BulkState:
        if reading.done():
            reading.result()
            if not window.n_held and not self._ended:
                return BulkState.COMPLETED
        if stopping.done():
            return BulkState.STOPPED
        if self._run.deadline is not None and datetime.now(UTC) >= self._run.deadline:
            return BulkState.DEADLINE
        n_failed = self._rows.n_failed - self._n_failed_before
        if self._run.max_errors is not None and n_failed > self._run.max_errors:
            return BulkState.TOO_MANY_ERRORS
        return BulkState.RUNNING

    async def _write(self, open_row: OpenRow) -> None:
        """Add the line of a row whose jobs have ended.

        Raises:
            LlamaqError: The answer needs a worker, and none has replied: `is_outage` of the error is true.
            RedisError: Redis refuses the commands.
            BulkRunRefused: A job of another run has the idempotency key.
        """
        row = open_row.row
        if any(isinstance(outcome, IdempotencyConflict) for outcome in open_row.outcomes.values()):
            raise BulkRunRefused(
                f"run {self._run.run_id}: a job of this id has another request: use another run id, or another queue"
            )
        stats: list[JobStats] = []
        try:
            results = open_row.results()
            line = await answer_line(self._run, row, results, queue=self._client.queue, now_s=int(time.time()))
        except LlamaqError as exc:
            if is_outage(exc):
                raise
            self._rows.add_error(row.number, error_line(self._run, row, exc))
        except (RedisError, OSError):
            raise
        except Exception as exc:  # noqa: BLE001  # a bad row fails alone
            self._rows.add_error(row.number, error_line(self._run, row, self._error_of_row(row.number, exc)))
        else:
            stats = [result.stats for result in results]
            self._rows.add_answer(row.number, line)
        self._meter.count(stats)

    async def _read_rows(self, window: Window) -> None:
        """Read the input as the window has room, until its end."""
        async for number, record in self._rows.records(4 * self._client.settings.max_request_bytes):
            self._meter.last_row = number
            row = await self._row_of(number, record)
            try:
                requests = await self._build_requests(row)
            except (RedisError, OSError):
                raise
            except Exception as exc:  # noqa: BLE001  # a bad row fails alone
                error = self._error_of_row(row.number, exc)
                await window.wait_for_room()
                window.add_outcome((OpenRow(row, 1), 0), error)
            else:
                open_row = OpenRow(row, len(requests))
                for index, request in enumerate(requests):
                    await window.wait_for_room()
                    window.add((open_row, index), request)

    async def _row_of(self, number: int, record: object) -> Row:
        if isinstance(record, InvalidRequest):
            row_id = record.row_id if isinstance(record, UnreadRow) else None
            return Row(number, form=self._run.form_of("plain"), row_id=row_id, error=record)
        pauses = Backoff(LOOK_S, LONGEST_PAUSE_S)
        while True:
            try:
                return await self._read(self._run, number, record)
            except (LlamaqError, RedisError, OSError) as exc:
                if not is_outage(exc):
                    raise
                log.info("bulk.row_delayed run=%s row=%d error=%s", self._run.run_id, number, exc)
                await asyncio.sleep(pauses.next_delay_s())
            except Exception as exc:  # noqa: BLE001  # a bad row fails alone
                return unread_row(self._run, number, record, self._error_of_row(number, exc))

    def _error_of_row(self, number: int, exc: Exception) -> LlamaqError:
        """Return the error of a row that is not a request, or whose answer cannot be written.

        An unexpected error is a defect of llamaq. Its text may contain the prompt, so the log has only its place.
        """
        if isinstance(exc, LlamaqError):
            return exc
        place = traceback.extract_tb(exc.__traceback__)[-1]
        where, kind = f"{place.filename}:{place.lineno}", type(exc).__name__
        log.error("bulk.row_failed run=%s row=%d error=%s at=%s", self._run.run_id, number, kind, where)
        return JobFailed(ErrorCode.INTERNAL, f"line {number}: a defect of llamaq ({kind}); the log names the place")

    async def _build_requests(self, row: Row) -> list[JobRequest]:
        """Return the requests of the jobs of a row.

        Raises:
            Exception: The row is not a request.
        """
        if row.error is not None:
            raise row.error
        return [
            await self._build_request(row_key(self._run.run_id, row.number, index), values)
            for index, values in enumerate(row.jobs)
        ]

    async def _build_request(self, key: str, values: dict[str, Any]) -> JobRequest:
        """Return the request of a job. If it has no seed, it gets a seed that depends on the run, the row and the job
        alone.

        Args:
            key: The idempotency key of the job.
            values: The arguments of `submit`.

        Raises:
            InvalidRequest: These are not valid.
        """
        options: Any = {**self._options, **translate(values)}
        if self._decide is not None:
            options = self._decide(options)
        options |= {"priority": self._run.priority, "stream": False, "idempotency_key": key}
        request = await build_request(options)
        if request.has_random_seed:
            digest = sha256(key.encode()).digest()
            request = request.model_copy(update={"seed": int.from_bytes(digest[:8]) >> (64 - SEED_BITS)})
        return request
