"""A submitted job, as its owner or anyone who knows its id sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamaq.common.errors import JobFailed, ResultTimeout
from llamaq.common.protocol.job_events import Failed, Finished, Tokens
from llamaq.common.protocol.job_outcome import JobState, Result
from llamaq.common.protocol.job_status import JobStatus
from llamaq.producer.queries.job_records import read_result, read_status
from llamaq.producer.streaming.event_readers import EndWaiter, EventReader, Position

if TYPE_CHECKING:
    from llamaq.producer.client import AsyncClient


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. All chunks of a job joined are its whole text and all its tokens.

    Text trails tokens where a character or a possible stop string is incomplete, so either may be empty.
    """

    text: str
    tokens: tuple[int, ...]
    index: int
    """0, 1, 2, …: counts the chunks that this stream yielded."""
    offset: int
    """Position of the first token in the job's output."""


class AsyncJob:
    """A handle: it holds an id and a client, nothing else, and may be made at any time in any process."""

    def __init__(self, client: AsyncClient, job_id: str, *, is_new: bool = False) -> None:
        self.id = job_id
        self.is_new = is_new
        """Whether this submit made the job; False where an idempotency key had one, and after `client.job()`."""
        self._client = client
        self._keys = client.keys.of_job(job_id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def status(self) -> JobStatus:
        """Where the job is. Raises `JobNotFound`."""
        return await read_status(self._client.redis, self._keys, self.id)

    async def cancel(self) -> bool:
        """Ask for the job's end; False when it had ended already. Raises `JobNotFound`.

        A waiting job ends at once, a running one within a few ticks; both keep what they generated.
        """
        return await self._client.cancel(self.id)

    async def result(self, *, timeout: float | None = None) -> Result:
        """Wait until the job has ended, at most `timeout` seconds (None: the client's `timeout_s`).

        The job goes on when the time is over. Raises `ResultTimeout`, `JobFailed`, `JobNotFound`.
        """
        if not self.is_new and (await self.status()).state in (JobState.FINISHED, JobState.FAILED):
            return await read_result(self._client.redis, self._keys, self.id)
        limit_s = self._client.settings.timeout_s if timeout is None else timeout
        waiter = EndWaiter(self._client.redis, self._keys, self.id)
        try:
            async with asyncio.timeout(limit_s):
                with self._client.subscriber.listening(waiter):
                    await waiter.wait()
        except TimeoutError as exc:
            raise ResultTimeout(f"job {self.id} has not ended within {limit_s:g} s; it goes on") from exc
        return await read_result(self._client.redis, self._keys, self.id)

    async def stream(self, *, timeout: float | None = None) -> AsyncGenerator[Chunk, None]:
        """All of the job's chunks from the first one, also when it ran or ended long ago.

        `timeout` is how many seconds one chunk may take (None: the client's `timeout_s`). Leaving early does not
        cancel the job. A job submitted with `stream=False` gives one chunk. Raises `ResultTimeout`, `JobFailed`,
        `JobNotFound`.
        """
        if not self.is_new:
            await self.status()  # an unknown id, or a Redis that does not answer, shows at once
        limit_s = self._client.settings.timeout_s if timeout is None else timeout
        reader = EventReader(self._client.redis, self._keys, self.id)
        index = 0
        with self._client.subscriber.listening(reader):
            while True:
                try:
                    async with asyncio.timeout(limit_s):
                        event = await reader.next_event()
                except TimeoutError as exc:
                    raise ResultTimeout(f"job {self.id} gave nothing for {limit_s:g} s; it goes on") from exc
                if not isinstance(event, Tokens):
                    break
                yield Chunk(event.text, event.tokens, index, event.offset)
                index += 1
        if isinstance(event, Failed):
            raise JobFailed(event.code, event.message, self.id)
        rest = await self._rest_after(reader.position, event)
        if rest is not None:
            yield Chunk(rest.text, rest.tokens, index, rest.offset)

    async def _rest_after(self, position: Position, end: Finished) -> Tokens | None:
        """What the result has and the events had not: all of it for a job without per-token events."""
        if end.stats.generated_tokens <= position.tokens:
            return None
        result = await read_result(self._client.redis, self._keys, self.id)
        return position.advance(Tokens(offset=0, tokens=result.tokens, text_offset=0, text=result.text))
