"""The handle of a submitted job, and the chunks that its stream yields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from llamaq.common.errors import JobFailed, JobNotFound, ResultTimeout
from llamaq.common.protocol.job_events import Failed, Finished, Tokens
from llamaq.common.protocol.job_outcome import JobState, Result
from llamaq.common.protocol.job_snapshots import JobStatus
from llamaq.producer.queries.job_records import read_result, read_status
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.streaming.event_readers import EndWaiter, EventReader, Position


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream. Joined in order, the chunks of a job contain its whole text and all its tokens.

    `text` or `tokens` may be empty: the worker delays the text of a token that ends inside a character, or that may
    begin a stop string.
    """

    text: str
    """New text since the previous chunk."""
    tokens: tuple[int, ...]
    """New token ids since the previous chunk."""
    index: int
    """Number of this chunk within this stream, from 0 on."""
    offset: int
    """Position of the first token of `tokens` among all generated tokens of the job, from 0 on."""


class AsyncJob:
    """A handle to a job. It has no state besides the job id, so any process may create one at any time.

    `AsyncClient.submit` and `AsyncClient.job` return handles.
    """

    def __init__(self, connection: QueueConnection, job_id: str, *, is_new: bool = False) -> None:
        self.id = job_id
        """The job id. It contains the queue and the partition, so another process needs only this id."""
        self.is_new = is_new
        """Whether `submit` created the job. False if its idempotency key already had a job, or after `client.job()`."""
        self._connection = connection
        self._keys = connection.keys.of_job(job_id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def status(self) -> JobStatus:
        """Return a snapshot of the job: its state, attempts, worker and times.

        Raises:
            JobNotFound: The id is wrong, or the result has expired.
        """
        return await read_status(self._connection.redis, self._keys, self.id)

    async def cancel(self) -> bool:
        """Request the job's cancellation.

        A waiting job finishes at once, a running job within a few ticks. The tokens generated so far are kept.

        Returns:
            True if the job will be cancelled, False if it had already finished or failed.

        Raises:
            JobNotFound: The id is wrong, or the result has expired.
        """
        code = await self._connection.scripts.cancel(self.id)
        if code == "gone":
            raise JobNotFound(self.id)
        return code != "done"

    async def result(self, *, timeout: float | None = None) -> Result:
        """Wait for the job to finish and return its result. A timeout does not cancel the job.

        Args:
            timeout: Longest wait in seconds. None: the client's `timeout_s`.

        Returns:
            The text, tokens, finish reason and stats of the job.

        Raises:
            ResultTimeout: The job has not finished in time.
            JobFailed: The job failed; `code` and `message` give the reason.
            JobNotFound: The id is wrong, or the result has expired.
        """
        if not self.is_new and (await self.status()).state in (JobState.FINISHED, JobState.FAILED):
            return await read_result(self._connection.redis, self._keys, self.id)
        timeout_s = self._connection.timeout_s(timeout)
        waiter = EndWaiter(self._connection.redis, self._keys, self.id)
        try:
            async with asyncio.timeout(timeout_s):
                with self._connection.subscriber.listening(waiter):
                    await waiter.wait()
        except TimeoutError as exc:
            raise ResultTimeout(f"job {self.id} has not finished within {timeout_s:g} s; it was not cancelled") from exc
        return await read_result(self._connection.redis, self._keys, self.id)

    async def stream(self, *, timeout: float | None = None) -> AsyncGenerator[Chunk, None]:
        """Yield all chunks of the job from its first token on, even if the job started or finished before this call.

        Several readers may stream one job. Closing the iterator early does not cancel the job.

        Args:
            timeout: Longest wait for one chunk in seconds. None: the client's `timeout_s`.

        Yields:
            The chunks of the job in order. A job submitted with `stream=False` yields one chunk when it finishes.

        Raises:
            ResultTimeout: No chunk arrived in time. The job is not cancelled.
            JobFailed: The job failed; `code` and `message` give the reason.
            JobNotFound: The id is wrong, or the result has expired.
        """
        if not self.is_new:
            await self.status()  # raises at once for an unknown id and for an unreachable Redis
        timeout_s = self._connection.timeout_s(timeout)
        reader = EventReader(self._connection.redis, self._keys, self.id)
        index = 0
        with self._connection.subscriber.listening(reader):
            while True:
                try:
                    async with asyncio.timeout(timeout_s):
                        event = await reader.next_event()
                except TimeoutError as exc:
                    message = f"job {self.id} has sent no chunk for {timeout_s:g} s; it was not cancelled"
                    raise ResultTimeout(message) from exc
                if not isinstance(event, Tokens):
                    break
                yield Chunk(event.text, event.tokens, index, event.offset)
                index += 1
        if isinstance(event, Failed):
            raise JobFailed(event.code, event.message, self.id)
        rest = await self._read_rest(reader.position, event)
        if rest is not None:
            yield Chunk(rest.text, rest.tokens, index, rest.offset)

    async def _read_rest(self, position: Position, end: Finished) -> Tokens | None:
        """Return the output after `position`, or None if all output was read.

        A job with `stream=False` has no `tokens` events, so this is its whole output.
        """
        if end.stats.generated_tokens <= position.tokens:
            return None
        result = await read_result(self._connection.redis, self._keys, self.id)
        return position.advance(Tokens(offset=0, tokens=result.tokens, text_offset=0, text=result.text))
