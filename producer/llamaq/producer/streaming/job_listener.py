"""The base class of the listeners of one job: how their callers wait, and how they read Redis."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from redis.asyncio import Redis

from llamaq.common.errors import JobNotFound
from llamaq.common.protocol.keys import JobKeys
from llamaq.producer.streaming.job_state import StoredState
from llamaq.producer.streaming.retried_reads import RetriedReads
from llamaq.producer.streaming.timed_wait import TimedWait


def _ignore(_: object) -> None:
    """Do nothing."""


class JobListener(ABC):
    """Receives the messages of one job from the subscriber, and reads the job from Redis when messages may be missing.

    Reads run in a separate task. So a caller whose timeout is over never waits for Redis, and never cancels a command.
    """

    def __init__(self, redis: Redis, keys: JobKeys, job_id: str) -> None:
        self.channel = keys.channel.encode()
        self.keys = keys
        self.job_id = job_id
        self.heard_s = 0.0
        """Event-loop time of the last message."""
        self.due_ms: int | None = None
        """Time, by the clock of Redis, at which any client may end the job. None: there is no such time, or it was not
        read yet."""
        self.on_deadline: Callable[[int | None], None] = _ignore
        """Called with `due_ms` each time that the job was read."""
        self.is_closed = False
        self._redis = redis
        self._reads = RetriedReads()
        self._wait = TimedWait()
        self._reading: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._is_missing = False
        """Whether the job does not exist in Redis."""

    @property
    def redis_error(self) -> Exception | None:
        """The error of the newest read, while Redis cannot be read. None: it can be read."""
        return self._reads.error

    @property
    @abstractmethod
    def is_receiving(self) -> bool:
        """Whether messages are expected all the time. False: a long time without messages is normal."""

    @abstractmethod
    def deliver(self, payload: bytes) -> None:
        """Receive a message of the channel. May neither block nor raise."""

    @abstractmethod
    def reread(self) -> None:
        """Read the job from Redis, from the beginning, because messages may have been lost."""

    @abstractmethod
    def update_state(self, state: StoredState) -> None:
        """Receive the state of the job, which was read because no message had arrived for some time."""

    @abstractmethod
    async def _read(self) -> None:
        """Read what is missing. It runs as a task, one at a time."""

    def fail(self, error: Exception) -> None:
        """Let the caller raise this error."""
        self._error = error
        self._wait.wake()

    def close(self) -> asyncio.Task[None] | None:
        """Release the timer, and return the task that still reads. The caller of `close` cancels it."""
        self.is_closed = True
        self._wait.close()
        return self._reading

    def _start_reading(self) -> None:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_and_wake())

    async def _read_and_wake(self) -> None:
        try:
            await self._read()
        except asyncio.CancelledError:
            if self.is_closed:
                raise
            # Something in redis-py cancelled this task: the caller starts the read again.
        except Exception as exc:  # noqa: BLE001  # the caller raises it
            self._error = exc
        finally:
            self._reading = None
            self._wait.wake()

    async def _wait_until(self, deadline_s: float) -> None:
        """Wait until something has changed.

        Raises:
            TimeoutError: The deadline has passed.
            JobNotFound: The id is wrong, or the job has expired.
            Exception: The error of a read.
        """
        if self._error is not None:
            raise self._error
        if self._is_missing:
            raise JobNotFound(self.job_id)
        if not await self._wait.until(deadline_s):
            raise TimeoutError
