"""The handle of a submitted job, and the chunks that its stream yields."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from llamaq.common.errors import InvalidRequest, JobFailed, JobNotFound
from llamaq.common.protocol.job_events import Failed, PromptProgress, TokenSpan
from llamaq.common.protocol.job_outcome import JobState, Result, TokenLogprobs
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.job_status import JobStatus
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.producer.call_timeout import CallTimeout, naming_job
from llamaq.producer.queries.job_progress import with_progress
from llamaq.producer.queries.job_records import read_result, read_status
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.streaming.early_progress import EarlyProgress
from llamaq.producer.streaming.end_waiter import EndWaiter
from llamaq.producer.streaming.event_reader import EventReader
from llamaq.producer.streaming.job_listener import JobListener
from llamaq.producer.streaming.retried_reads import RetriedReads


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
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each of `tokens`, its probability and its alternatives, if the job asked for `logprobs`."""
    tag_offsets: tuple[int, ...] = ()
    """Positions in the whole text of the job, in characters, of the tokens that are tags of reasoning or tool calls,
    such as `<tool_call>`, if the job has `special`. Only tags that begin in `text`."""
    progress: PromptProgress | None = None
    """How much of the prompt is computed, if the job asked for `prompt_progress`. Such a chunk has no text."""
    prompt_logprobs: PromptLogprobs | None = None
    """The probabilities of the prompt's tokens, in the first chunk with tokens, if the job asked for `prompt_logprobs`.
    The result has them too, also if no token was generated."""


class AsyncJob:
    """A handle to a job. It has no state besides the job id, so any process may create one at any time.

    `AsyncClient.submit` and `AsyncClient.job` return handles.
    """

    def __init__(
        self, connection: QueueConnection, job_id: str, *, is_new: bool = False, is_shared: bool = False
    ) -> None:
        self.id = job_id
        """The job id. It contains the queue and the partition, so another process needs only this id."""
        self.is_new = is_new
        """Whether `submit` created the job. False if its idempotency key already had a job, or after `client.job()`."""
        self.is_shared = is_shared
        """Whether other callers may get the same job, for example through its idempotency key."""
        self.early_progress: EarlyProgress | None = None
        """Has subscribed before the submit, so that the first stream of this handle misses no progress. `client.stream`
        sets it."""
        self._connection = connection
        self._keys = connection.keys.of_job(job_id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def status(self) -> JobStatus:
        """Return a snapshot of the job: its state, progress, attempts, worker and times.

        If the job has reached a deadline, this call ends it, even without a worker.

        Raises:
            JobNotFound: The id is wrong, or the result has expired.
        """
        return await with_progress(self._connection, await read_status(self._connection, self.id))

    async def position(self) -> int | None:
        """Return how many jobs get a slot before this waiting job. `status().position` is the same number.

        The call is one short script in Redis, so it may be repeated for many jobs.

        Returns:
            The number. None: the job is not due, has a slot, has ended or does not exist.
        """
        return await self._connection.scripts.position(self.id)

    async def cancel(self) -> bool:
        """Request the job's cancellation.

        A waiting job finishes at once, a running job within a few ticks. The tokens generated so far are kept.

        Returns:
            True if the job was asked to end; it may still finish before. False if it had finished or failed.

        Raises:
            JobNotFound: The id is wrong, or the result has expired.
        """
        code = await self._connection.scripts.cancel(self.id)
        if code == "gone":
            raise JobNotFound(self.id)
        return code != "done"

    async def set_priority(self, priority: Priority | Literal["interactive", "bulk"]) -> bool:
        """Change the priority of a waiting job. The job then waits behind the other jobs of its new priority.

        Args:
            priority: The new priority.

        Returns:
            True if the job waits and has this priority now. False if it runs or has ended. Also False if it was
            interrupted and the queue is paused: a worker continues it with its old priority.

        Raises:
            InvalidRequest: There is no such priority.
            JobNotFound: The id is wrong, or the result has expired.
        """
        try:
            wanted = Priority(priority)
        except ValueError as exc:
            raise InvalidRequest(f"priority: {str(priority)[:100]!r} is neither 'interactive' nor 'bulk'") from exc
        code = await self._connection.scripts.set_priority(self.id, wanted)
        if code == "gone":
            raise JobNotFound(self.id)
        return code == "changed"

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
            NoWorker: The client has `require_worker`, and no worker serves the queue.
        """
        return await self.result_within(CallTimeout(self._connection.timeout_s(timeout)))

    async def stream(self, *, timeout: float | None = None) -> AsyncGenerator[Chunk, None]:
        """Yield all chunks of the job from its first token on, even if the job started or finished before this call.

        Several readers may stream one job. Closing the iterator early does not cancel the job.

        Args:
            timeout: Longest wait for one chunk in seconds. None: the client's `timeout_s`.

        Yields:
            The chunks of the job in order. A job submitted with `stream=False` yields one chunk when it finishes.
            A job submitted with `prompt_progress=True` also yields chunks with `progress` while its prompt is computed;
            a call that begins later misses those before it. `client.stream` listens before it submits the job.

        Raises:
            ResultTimeout: No chunk arrived in time. The job is not cancelled.
            JobFailed: The job failed; `code` and `message` give the reason.
            JobNotFound: The id is wrong, or the result has expired.
            NoWorker: The client has `require_worker`, and no worker serves the queue.
        """
        timeout_s = self._connection.timeout_s(timeout)
        reader = EventReader(self._connection.redis, self._keys, self.id)
        index = n_tokens = 0
        with naming_job(self.id):
            is_open = await self._is_open(CallTimeout(timeout_s))
            with self._following(reader, is_open=is_open):
                if self.early_progress is not None:
                    self.early_progress.pass_to(reader)
                while isinstance(event := await reader.next_event(timeout_s), (TokenSpan, PromptProgress)):
                    chunk = _chunk(event, index, n_tokens)
                    yield chunk
                    index, n_tokens = index + 1, chunk.offset + len(chunk.tokens)
            if isinstance(event, Failed):
                raise JobFailed(event.code, event.message, self.id)

    async def result_within(self, limit: CallTimeout) -> Result:
        """Wait like `result`, within a timeout that has begun already."""
        with naming_job(self.id):
            if await self._is_open(limit):
                waiter = EndWaiter(self._connection.redis, self._keys, self.id)
                with self._following(waiter):
                    try:
                        await waiter.wait(limit.end_s)
                    except TimeoutError as exc:
                        raise limit.error(self.id, "has not finished", waiter.redis_error) from exc
            reading = RetriedReads().read(lambda: read_result(self._connection.redis, self._keys, self.id))
            return await limit.bound(reading, self.id, "has finished, but Redis has not returned its result")

    async def _is_open(self, limit: CallTimeout) -> bool:
        """Return whether the job may still run. Raises at once for an unknown id and for an unreachable Redis."""
        if self.is_new:
            return True
        reading = read_status(self._connection, self.id)
        status = await limit.bound(reading, self.id, "could not be found: Redis has not answered")
        return status.state not in (JobState.FINISHED, JobState.FAILED)

    @contextmanager
    def _following(self, listener: JobListener, *, is_open: bool = True) -> Iterator[None]:
        """Deliver the job's messages to the listener. For an open job, also watch whether a worker serves its queue."""
        with ExitStack() as exits:
            exits.enter_context(self._connection.subscriber.listening(listener))
            if is_open:
                queue = JobId.parse(self.id).queue
                exits.enter_context(self._connection.workers.waiting(queue, listener.fail))
            yield


def _chunk(event: TokenSpan | PromptProgress, index: int, n_tokens: int) -> Chunk:
    if isinstance(event, PromptProgress):
        return Chunk("", (), index, n_tokens, progress=event)
    return Chunk(
        event.text,
        event.tokens,
        index,
        event.offset,
        event.logprobs,
        event.tag_offsets,
        prompt_logprobs=event.prompt_logprobs,
    )
