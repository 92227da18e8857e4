"""The asyncio client: submits jobs to a queue and follows them. `llamaq.producer.sync` is generated from it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

from llamaq.common.protocol.job_options import JobOptions
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.keys import JobId
from llamaq.common.settings import client_settings
from llamaq.producer import submission, submit_many
from llamaq.producer.auto_cancelled_stream import AsyncStream
from llamaq.producer.calls.calls_base import Messages
from llamaq.producer.calls.dead_letter_calls import DeadLetterCalls
from llamaq.producer.calls.embedding_calls import EmbeddingCalls
from llamaq.producer.calls.map_call import MapCall
from llamaq.producer.calls.slot_calls import SlotCalls
from llamaq.producer.calls.text_calls import TextCalls
from llamaq.producer.job_handle import AsyncJob
from llamaq.producer.streaming.subscriber import Subscriber
from llamaq.producer.submission import build_request


class JobArguments(JobOptions, total=False):
    """The arguments of `submit` for one job of `submit_many`: a prompt and job options."""

    prompt: str
    tokens: Sequence[int]
    messages: Messages


class AsyncClient(TextCalls, DeadLetterCalls, SlotCalls, EmbeddingCalls, MapCall):
    """A client for one queue. It connects to Redis at the first call.

        async with AsyncClient("redis://localhost:6379/0") as client:
            async for chunk in await client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="", flush=True)

    One client serves any number of concurrent calls, in one event loop at a time.

    `ClientSettings` documents the settings with their units, bounds and defaults. If an argument is None, its
    `LLAMAQ_*` environment variable is used. If this variable is not set, the default is used.

    Every method that sends commands to Redis raises `redis.exceptions.RedisError` if Redis cannot be reached.

    Args:
        url: The setting `redis_url`.
        queue: The setting `queue`.
        timeout_s: The setting `timeout_s`, in seconds. It applies to every call without a `timeout`.
        result_ttl_s: The setting `result_ttl_s`, in seconds.
        event_ttl_s: The setting `event_ttl_s`, in seconds.
        key_prefix: The setting `key_prefix`.
        partitions: The setting `partitions`.
        max_request_bytes: The setting `max_request_bytes`.
        require_worker: The setting `require_worker`.
        tenant: The setting `tenant`.

    Raises:
        InvalidSettings: An argument or an environment variable is not valid.
    """

    def __init__(
        self,
        url: str | None = None,
        queue: str | None = None,
        *,
        timeout_s: float | None = None,
        result_ttl_s: float | None = None,
        event_ttl_s: float | None = None,
        key_prefix: str | None = None,
        partitions: int | None = None,
        max_request_bytes: int | None = None,
        require_worker: bool | None = None,
        tenant: str | None = None,
    ) -> None:
        settings = client_settings(
            redis_url=url,
            queue=queue,
            timeout_s=timeout_s,
            result_ttl_s=result_ttl_s,
            event_ttl_s=event_ttl_s,
            key_prefix=key_prefix,
            partitions=partitions,
            max_request_bytes=max_request_bytes,
            require_worker=require_worker,
            tenant=tenant,
        )
        super().__init__(settings)

    def __repr__(self) -> str:
        return f"<AsyncClient queue={self.queue!r} {self.connection!r}>"

    @property
    def subscriber(self) -> Subscriber:
        """The subscriber of the events of jobs. Its `repr` shows how many jobs are followed."""
        return self.connection.subscriber

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all calls of other tasks and all open streams, then close all connections. Jobs of `submit` keep running.

        These calls raise `RuntimeError`, and their jobs are cancelled. The next call connects again.
        """
        try:
            await self.auto_cancelled.aclose()
        finally:
            await self.connection.aclose()

    async def generate(self, prompt: str, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Result:
        """Submit a text prompt and wait for the result.

        If the call times out or is interrupted, its job is cancelled. A job with an idempotency key is never cancelled,
        because other callers may share it. The timeout bounds everything that the call waits for.

        Args:
            prompt: The text to continue. Special tokens in it are parsed.
            timeout: Longest wait for the result in seconds. None: the client's `timeout_s`.
            **options: Job options; `JobParams` documents each of them.

        Returns:
            The text, tokens, finish reason, seed and stats of the job.

        Raises:
            InvalidRequest: An argument is not valid. Nothing was submitted.
            QueueFull: The queue has `max_queue` waiting jobs. Nothing was submitted.
            RedisFull: Redis has reached its `maxmemory`. Nothing was submitted.
            JobFailed: The job failed; `code` and `message` give the reason.
            NoWorker: No worker serves the queue, and the timeout was reached or the client has `require_worker`.
            ResultTimeout: The timeout was reached. The message says what the call waited for.
        """
        return await self.auto_cancelled.generate(await build_request(options, stream=False, prompt=prompt), timeout)

    async def generate_tokens(
        self, tokens: Sequence[int], *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Result:
        """Submit a prompt of token ids and wait for the result, like `generate`.

        Args:
            tokens: The token ids of the prompt. No token is added, not even BOS.
            timeout: Longest wait for the result in seconds. None: the client's `timeout_s`.
            **options: Job options; `JobParams` documents each of them.

        Returns:
            The text, tokens, finish reason, seed and stats of the job.

        Raises:
            LlamaqError: The same errors as `generate`.
        """
        return await self.auto_cancelled.generate(await build_request(options, stream=False, tokens=tokens), timeout)

    async def chat(self, messages: Messages, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Result:
        """Submit a chat and wait for the answer, like `generate`.

        Args:
            messages: The messages, oldest first. The worker renders them with the model's chat template.
            timeout: Longest wait for the result in seconds. None: the client's `timeout_s`.
            **options: Job options; `JobParams` documents each of them.

        Returns:
            The text, tokens, finish reason, seed and stats of the job.

        Raises:
            LlamaqError: The same errors as `generate`.
        """
        return await self.auto_cancelled.generate(
            await build_request(options, stream=False, messages=messages), timeout
        )

    async def stream(self, prompt: str, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> AsyncStream:
        """Submit a text prompt and return the stream of the generated text in chunks.

        This call raises the errors of the submit. `started` of the stream raises the errors until the first chunk. So a
        web backend gets both before it starts a response. The job is cancelled when the stream ends early, see
        `AsyncStream`.

        Args:
            prompt: The text to continue. Special tokens in it are parsed.
            timeout: Longest wait for one chunk in seconds. None: the client's `timeout_s`.
            **options: Job options; `JobParams` documents each of them.

        Returns:
            The stream of the job's chunks.

        Raises:
            InvalidRequest: An argument is not valid. Nothing was submitted.
            QueueFull: The queue has `max_queue` waiting jobs. Nothing was submitted.
            RedisFull: Redis has reached its `maxmemory`. Nothing was submitted.
            JobFailed: By the stream: the job failed; `code` and `message` give the reason.
            NoWorker: The client has `require_worker`, and no worker serves the queue. By the stream: the timeout was
                reached, and no worker serves the queue.
            ResultTimeout: By the stream: the timeout was reached.
        """
        return await self.auto_cancelled.stream(await build_request(options, prompt=prompt), timeout)

    async def stream_tokens(
        self, tokens: Sequence[int], *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> AsyncStream:
        """Submit a prompt of token ids and return the stream of the generated text, like `stream`.

        Args:
            tokens: The token ids of the prompt. No token is added, not even BOS.
            timeout: Longest wait for one chunk in seconds. None: the client's `timeout_s`.
            **options: Job options; `JobParams` documents each of them.

        Returns:
            The stream of the job's chunks.

        Raises:
            LlamaqError: The same errors as `stream`.
        """
        return await self.auto_cancelled.stream(await build_request(options, tokens=tokens), timeout)

    async def stream_chat(
        self, messages: Messages, *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> AsyncStream:
        """Submit a chat and return the stream of the answer, like `stream`.

        Args:
            messages: The messages, oldest first. The worker renders them with the model's chat template.
            timeout: Longest wait for one chunk in seconds. None: the client's `timeout_s`.
            **options: Job options; `JobParams` documents each of them.

        Returns:
            The stream of the job's chunks.

        Raises:
            LlamaqError: The same errors as `stream`.
        """
        return await self.auto_cancelled.stream(await build_request(options, messages=messages), timeout)

    async def submit(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Messages | None = None,
        durable: int = 0,
        **options: Unpack[JobOptions],
    ) -> AsyncJob:
        """Put a job into the queue and return its handle. The job runs whether or not anything waits for it.

        Exactly one of `prompt`, `tokens` and `messages` is required.

        Args:
            prompt: The text to continue. Special tokens in it are parsed.
            tokens: The token ids of the prompt. No token is added, not even BOS.
            messages: The messages of a chat, oldest first.
            durable: Number of replicas of Redis that must have the job before the call returns. It waits for them at
                most 2 s.
            **options: Job options; `JobParams` documents each of them.

        Returns:
            The handle of the job. If a job with the same idempotency key exists, the handle of that job.

        Raises:
            InvalidRequest: An argument is not valid.
            NoWorker: The client has `require_worker`, and no worker serves the queue.
            QueueFull: The queue has `max_queue` waiting jobs.
            QueueDraining: The queue accepts no jobs until `resume`.
            RedisFull: Redis has reached its `maxmemory`.
            NotDurable: Fewer than `durable` replicas have confirmed the job. The job was submitted; `job_id` is its id.
            ResultTimeout: Redis has not answered within the client's `timeout_s`. It may have the job.
        """
        request = await build_request(options, prompt=prompt, tokens=tokens, messages=messages)
        return await submission.submit(self.connection, request, durable=durable)

    async def submit_many(self, jobs: Sequence[JobArguments], *, durable: int = 0) -> tuple[AsyncJob, ...]:
        """Put many jobs into the queue, in one round trip for each 1,000 of them, and return their handles in order.

            client.submit_many([{"prompt": text, "max_tokens": 64} for text in texts])

        All jobs are validated first: if one job is not valid, no job is submitted. Redis then accepts or refuses each
        job separately, as for `submit`.

        Args:
            jobs: The arguments of `submit` for each job.
            durable: Number of replicas of Redis that must have the jobs, as for `submit`.

        Raises:
            InvalidRequest: A job is not valid. The message begins with its index, such as `jobs[3]`. No job was
                submitted.
            NoWorker: The client has `require_worker`, and no worker serves the queue. No job was submitted.
            BatchIncomplete: Some jobs were refused, for example with `QueueFull`. For each job, `errors` has the
                reason, or `job_ids` has its id. The jobs with an id were submitted. `__cause__` is a `NotDurable` if
                too few replicas have confirmed the submitted jobs.
            NotDurable: Fewer than `durable` replicas have confirmed the jobs. The jobs were submitted; `job_ids` are
                their ids.
            ResultTimeout: Redis has not answered within the client's `timeout_s`. It may have some of the jobs.
        """
        return await submit_many.submit_many(self.connection, jobs, durable)

    def job(self, job_id: str) -> AsyncJob:
        """Return the handle of a submitted job. Another process may have submitted the job, to any queue.

        Args:
            job_id: The id of the job. The call does not check whether the job exists.

        Raises:
            InvalidRequest: `job_id` does not have the form of a job id.
        """
        return AsyncJob(self.connection, str(JobId.parse(job_id)))

    async def cancel(self, job_id: str) -> bool:
        """Request the cancellation of a job. See `AsyncJob.cancel`.

        Args:
            job_id: The id of the job, in any queue.

        Returns:
            True if the job was asked to end; it may still finish before. False if it had finished or failed.

        Raises:
            JobNotFound: The id is wrong, or the result has expired.
            InvalidRequest: `job_id` does not have the form of a job id.
        """
        return await self.job(job_id).cancel()
