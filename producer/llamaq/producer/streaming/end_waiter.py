"""`EndWaiter` waits until a job has ended."""

from __future__ import annotations

from typing import Any

from llamaq.common.protocol import codec
from llamaq.producer.streaming.job_end import has_ended
from llamaq.producer.streaming.job_listener import JobListener
from llamaq.producer.streaming.job_state import STATE_FIELDS, StoredState, read_state


class EndWaiter(JobListener):
    """Waits until a job has ended, without reading its output."""

    is_receiving = False
    _must_read = False
    _has_ended = False

    def __repr__(self) -> str:
        return f"<EndWaiter {self.job_id} ended={self._has_ended}>"

    def deliver(self, payload: bytes) -> None:
        """Read the job's status if the message may be a terminal event."""
        if not (codec.is_tokens_event(payload) or codec.is_prompt_progress(payload)):
            self.reread()

    def reread(self) -> None:
        """Read the job's status."""
        self._must_read = True
        self._start_reading()

    def update_state(self, state: StoredState) -> None:
        """Receive the state of the job."""
        self.on_deadline(state.due_ms)
        self._is_missing = state.status is None
        self._has_ended = has_ended(state.status)
        if self._is_missing or self._has_ended:
            self._wait.wake()

    async def wait(self, deadline_s: float) -> None:
        """Return when the job has ended.

        Raises:
            TimeoutError: The deadline has passed, a time of the event loop.
            JobNotFound: The id is wrong, or the job has expired.
            RedisError: Redis refuses to read the job.
        """
        while not self._has_ended:
            if self._must_read:
                self._start_reading()
            await self._wait_until(deadline_s)

    async def _read(self) -> None:
        while self._must_read and not self._has_ended:
            self._must_read = False
            try:
                state = await self._reads.read(self._read_state)
            except BaseException:
                self._must_read = True
                raise
            self.update_state(state)

    async def _read_state(self) -> StoredState:
        values: Any = await self._redis.hmget(self.keys.job, *STATE_FIELDS)
        return read_state(values)
