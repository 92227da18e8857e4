"""The timeout of one call: it bounds everything that the call waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from redis.exceptions import RedisError

from llamaq.common.errors import LlamaqError, ResultTimeout

T = TypeVar("T")


class CallTimeout:
    """The time that a caller gave one call. It begins when the object is created."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.end_s = asyncio.get_running_loop().time() + timeout_s
        """Event-loop time of the end."""

    def __repr__(self) -> str:
        return f"<CallTimeout {self.timeout_s:g} s>"

    @property
    def remaining_s(self) -> float:
        """Seconds until the end; 0 after the end."""
        return max(0.0, self.end_s - asyncio.get_running_loop().time())

    async def bound(self, work: Coroutine[Any, Any, T], job_id: str, problem: str) -> T:
        """Return the result of `work`. When the time is over, cancel `work`.

        Args:
            work: It sends commands to Redis, which may not answer.
            job_id: Id of the job that the call waits for.
            problem: What has not happened in time, as the predicate of the job: `has not finished`.

        Raises:
            ResultTimeout: The end came first.
        """
        try:
            async with asyncio.timeout_at(self.end_s) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.error(job_id, problem) from None

    def error(self, job_id: str, problem: str, cause: Exception | None = None) -> ResultTimeout:
        """Return the error of this call after its end."""
        return timeout_error(job_id, problem, self.timeout_s, cause)


def timeout_error(job_id: str, problem: str, timeout_s: float, cause: Exception | None = None) -> ResultTimeout:
    """Return the error that says what has not happened in time, and why Redis could not be read (`cause`)."""
    reason = f": Redis cannot be read: {cause}" if cause is not None else ""
    return ResultTimeout(f"job {job_id} {problem} within {timeout_s:g} s{reason}", job_id)


@contextmanager
def naming_job(job_id: str) -> Iterator[None]:
    """Add the id of the job to the errors that are raised in this context: as `job_id`, and at the end of the message.

    The caller of `generate` needs the id to find the job, because it has no handle.
    """
    try:
        yield
    except (LlamaqError, RedisError) as exc:
        exc.job_id = job_id  # type: ignore[union-attr]  # errors of redis-py have no such attribute
        if job_id not in str(exc):
            exc.args = (f"{exc} (job {job_id})", *exc.args[1:])
        raise
