"""Turns the records of a bulk run's input into rows, and rows into the requests of their jobs."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.backoff import Backoff
from llamaq.common.errors import (
    ErrorCode,
    InvalidRequest,
    JobFailed,
    LlamaqError,
    NoWorker,
    ResultTimeout,
    SlotCommandRefused,
)
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.bulk.input_row import Row, row_key, unread_row
from llamaq.producer.bulk.run_description import RunParameters
from llamaq.producer.bulk.table_rows import UnreadRow
from llamaq.producer.option_synonyms import translate
from llamaq.producer.streaming.retried_reads import is_temporary
from llamaq.producer.submission import SEED_BITS, build_request

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses before a row is read again that needs a reply of a worker, while no worker replies."""

ReadRow = Callable[[RunParameters, int, object], Awaitable[Row]]
Decide = Callable[[dict[str, Any]], dict[str, Any]]


class RowRequests:
    """Makes the rows of a run and their requests. A row that is not a request has its error.

    Args:
        run: The parameters of the run.
        read: Returns the row of a record. It is called again later if it needs a worker and none has replied.
        decide: Returns the job options of a row, given the options that the row and the run ask for. None: the given
            options are used.
    """

    def __init__(self, run: RunParameters, read: ReadRow, decide: Decide | None) -> None:
        self._run = run
        self._read = read
        self._decide = decide
        self._options = translate(run.options)

    async def row_of(self, number: int, record: object) -> Row:
        """Return the row of a record. Wait for a worker if the row needs one.

        Args:
            number: The number of the row.
            record: The decoded JSON of a line, a record of a table, or the decoding error.
        """
        if isinstance(record, InvalidRequest):
            row_id = record.row_id if isinstance(record, UnreadRow) else None
            return Row(number, form=self._run.form_of("plain"), row_id=row_id, error=record)
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                return await self._read(self._run, number, record)
            except (LlamaqError, RedisError, OSError) as exc:
                if not is_outage(exc):
                    raise
                log.info("bulk.row_delayed run=%s row=%d error=%s", self._run.run_id, number, exc)
                await asyncio.sleep(pauses.next_delay_s())
            except Exception as exc:  # noqa: BLE001  # a bad row fails alone
                return unread_row(self._run, number, record, error_of_row(self._run.run_id, number, exc))

    async def build(self, row: Row) -> list[JobRequest] | LlamaqError:
        """Return the requests of the jobs of a row, or why the row has none."""
        if row.error is not None:
            return error_of_row(self._run.run_id, row.number, row.error)
        try:
            return [
                await self._build_request(row_key(self._run.run_id, row.number, index), values)
                for index, values in enumerate(row.jobs)
            ]
        except (RedisError, OSError):
            raise
        except Exception as exc:  # noqa: BLE001  # a bad row fails alone
            return error_of_row(self._run.run_id, row.number, exc)

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

    def __repr__(self) -> str:
        return f"<RowRequests of {self._run.run_id}>"


def error_of_row(run_id: str, number: int, exc: Exception) -> LlamaqError:
    """Return the error of a row that is not a request, or whose answer cannot be written.

    An unexpected error is a defect of llamaq. Its text may contain the prompt, so the log has only its place.
    """
    if isinstance(exc, JobFailed):  # a defect, found when the row was read
        return exc
    if isinstance(exc, LlamaqError):
        return InvalidRequest(f"line {number}: {exc}")
    place = traceback.extract_tb(exc.__traceback__)[-1]
    where, kind = f"{place.filename}:{place.lineno}", type(exc).__name__
    log.error("bulk.row_failed run=%s row=%d error=%s at=%s", run_id, number, kind, where)
    return JobFailed(ErrorCode.INTERNAL, f"line {number}: a defect of llamaq ({kind}); the log names the place")


def is_outage(error: Exception) -> bool:
    """Return whether an error is caused by the current state of the workers or of Redis, and not by the row."""
    if isinstance(error, NoWorker | ResultTimeout | SlotCommandRefused):
        return True
    return isinstance(error, RedisError | OSError) and is_temporary(error)
