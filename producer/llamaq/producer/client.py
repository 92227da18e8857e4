"""The client of a web backend, for asyncio. `llamaq.producer.sync` has the same one for threads."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

from redis.exceptions import RedisError, ResponseError

from llamaq.common.background_tasks import BackgroundTasks
from llamaq.common.errors import (
    DeadLetterNotFound,
    InvalidRequest,
    JobFailed,
    JobNotFound,
    LlamaqError,
    NoWorker,
    QueueFull,
    RedisFull,
    ResultTimeout,
)
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import JobOptions, JobRequest, Message
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.queue_depth import queue_depth
from llamaq.common.protocol.queue_state import QueueDepth, QueueStats, Worker
from llamaq.common.protocol.scripts import Refused
from llamaq.common.protocol.slot_commands import SlotAction, SlotCommand, SlotFile, SlotReply, WorkerSlots
from llamaq.common.redis.redis_errors import is_full
from llamaq.common.settings import client_settings
from llamaq.producer.connection import Connection
from llamaq.producer.job import AsyncJob, Chunk
from llamaq.producer.queries import dead_letters, queue_snapshots, slot_commands
from llamaq.producer.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

SEED_BITS = 53
"""A drawn seed survives a trip through JSON in any language."""

Messages = Sequence[Message | Mapping[str, str]]
"""A chat: `{"role": "user", "content": "hi"}` and so on."""


class AsyncClient:
    """Submits jobs to one queue and follows them.

    Arguments left out come from `LLAMAQ_*` variables, else from the defaults of `ClientSettings`. Connects at the
    first call, not before. One client serves any number of concurrent calls, within one event loop.

        async with AsyncClient("redis://localhost:6379/0") as client:
            async for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="", flush=True)

    All methods that talk to Redis raise `redis.exceptions.RedisError` when it cannot be reached.
    """

    def __init__(
        self,
        url: str | None = None,
        queue: str | None = None,
        *,
        timeout_s: float | None = None,
        result_ttl_s: float | None = None,
        key_prefix: str | None = None,
        partitions: int | None = None,
        max_request_bytes: int | None = None,
    ) -> None:
        self.settings = client_settings(
            redis_url=url,
            queue=queue,
            timeout_s=timeout_s,
            result_ttl_s=result_ttl_s,
            key_prefix=key_prefix,
            partitions=partitions,
            max_request_bytes=max_request_bytes,
        )
        self.queue = self.settings.queue
        self.connection = Connection.of(self.settings)
        self.keys = self.connection.keys
        self.redis = self.connection.redis
        self.subscriber = self.connection.subscriber
        self._scripts = self.connection.scripts
        self._background = BackgroundTasks()

    def __repr__(self) -> str:
        return f"<AsyncClient queue={self.queue!r} {self.subscriber!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Send the cancellations that are still on their way, and close all connections. Jobs go on."""
        await self._background.wait()
        await self.connection.aclose()

    async def generate(self, prompt: str, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Result:
        """Submit a prompt and wait for its result, at most `timeout` seconds (None: the client's `timeout_s`).

        The job is cancelled when the time is over or this task is cancelled, unless an idempotency key shares it.
        Raises `InvalidRequest`, `QueueFull`, `RedisFull`, `JobFailed`, `NoWorker`, `ResultTimeout`.
        """
        return await self._generate(self._request(options, stream=False, prompt=prompt), timeout)

    async def generate_tokens(
        self, tokens: Sequence[int], *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Result:
        """Like `generate`, with a prompt of token ids, taken as they are."""
        return await self._generate(self._request(options, stream=False, tokens=tokens), timeout)

    async def chat(self, messages: Messages, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Result:
        """Like `generate`, with a chat, rendered by the model's own template."""
        return await self._generate(self._request(options, stream=False, messages=messages), timeout)

    def stream(
        self, prompt: str, *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Submit a prompt and yield what it generates; the job is submitted with the first chunk asked for.

        `timeout` is how many seconds one chunk may take (None: the client's `timeout_s`). The job is cancelled when
        that is over, when the iterator is closed early, or when this task is cancelled, unless an idempotency key
        shares it. Raises what `generate` raises.
        """
        return self._stream(self._request(options, prompt=prompt), timeout)

    def stream_tokens(
        self, tokens: Sequence[int], *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Like `stream`, with a prompt of token ids, taken as they are."""
        return self._stream(self._request(options, tokens=tokens), timeout)

    def stream_chat(
        self, messages: Messages, *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Like `stream`, with a chat, rendered by the model's own template."""
        return self._stream(self._request(options, messages=messages), timeout)

    async def submit(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncJob:
        """Put a job into the queue and return its handle; it runs whether anyone waits for it or not.

        Give exactly one of `prompt`, `tokens` and `messages`. Raises `InvalidRequest`, `QueueFull`, `RedisFull`.
        """
        return await self._submit(self._request(options, prompt=prompt, tokens=tokens, messages=messages))

    def job(self, job_id: str) -> AsyncJob:
        """The handle of a job submitted before, by anyone, also on another queue. Raises `InvalidRequest`."""
        return AsyncJob(self.connection, job_id)

    async def cancel(self, job_id: str) -> bool:
        """Ask for a job's end; False when it had ended already. Raises `JobNotFound`, `InvalidRequest`."""
        return await self.job(job_id).cancel()

    async def queue_depth(self) -> QueueDepth:
        """How many jobs wait and how many are with a worker."""
        return await queue_depth(self.redis, self.keys, self.queue, self.settings.partitions)

    async def workers(self) -> tuple[Worker, ...]:
        """The live workers of the queue: their cards and last heartbeats."""
        return await queue_snapshots.read_workers(self.redis, self.keys, self.queue)

    async def stats(self) -> QueueStats:
        """Depth, workers, and the stats of the jobs that ended last, newest first."""
        depth, workers, recent = await asyncio.gather(
            self.queue_depth(), self.workers(), queue_snapshots.read_recent(self.redis, self.keys, self.queue)
        )
        return QueueStats(queue=self.queue, depth=depth, workers=workers, recent=recent)

    async def dead_letters(self) -> tuple[DeadLetter, ...]:
        """What was given up, newest first: jobs that workers died of, and entries that were no job."""
        return await dead_letters.read_all(self.redis, self.keys, self.queue, self.settings.partitions)

    async def dead_letter(self, letter_id: str) -> DeadLetterDetails:
        """All that is kept of a dead letter: its request, and what was generated.

        Raises `DeadLetterNotFound`, `InvalidRequest`.
        """
        return await dead_letters.read_details(self.redis, self.keys, letter_id)

    async def retry_dead_letter(self, letter_id: str) -> AsyncJob:
        """Submit the job of a dead letter again, from its beginning, and take the letter out.

        The new job has the same request with the same seed and metadata, and an id of its own; the idempotency key
        stays with the old one. Whoever retries a letter at the same time gets the same new job. Raises `JobNotFound`
        when the request has expired, `InvalidRequest` for an entry that was no job, `DeadLetterNotFound`,
        `QueueFull`, `RedisFull`.
        """
        queue, letter = await dead_letters.find(self.redis, self.keys, letter_id)
        if letter.job_id is None:
            raise InvalidRequest(f"{letter.id} was no job ({letter.reason}): there is nothing to retry, only to purge")
        request = await dead_letters.read_request(self.redis, self.keys, letter.job_id)
        new_id = dead_letters.id_of_retry(letter, JobId.parse(letter.job_id))
        job = await self._submit(request.model_copy(update={"idempotency_key": None}), new_id)
        await self._scripts.purge(queue, letter.partition, letter.entry, letter.job_id)
        return job

    async def purge_dead_letter(self, letter_id: str) -> None:
        """Take a dead letter out; its job then expires like any other. Raises `DeadLetterNotFound`."""
        queue, letter = await dead_letters.find(self.redis, self.keys, letter_id)
        if not await self._scripts.purge(queue, letter.partition, letter.entry, letter.job_id):
            raise DeadLetterNotFound(letter_id)

    async def slots(self, *, worker: str | None = None, timeout: float | None = None) -> tuple[WorkerSlots, ...]:
        """The slots of the queue's workers, or of one, and the states that are saved by name. Raises `NoWorker`.

        Here and below `timeout` is how many seconds the answer may take (None: the client's `timeout_s`); after that
        it is a `ResultTimeout`.
        """
        order = slot_commands.check_order(SlotAction.LIST)
        workers = await self.workers()
        if worker is None and workers:
            ids = [one.card.worker for one in workers]
        else:
            ids = [slot_commands.choose_worker(workers, self.queue, worker)]
        replies = await asyncio.gather(*(self._ask(one, order, timeout) for one in ids))
        return tuple(
            WorkerSlots(worker=one, slots=reply.slots, files=reply.files)
            for one, reply in zip(ids, replies, strict=True)
        )

    async def save_slot(
        self, slot: int, name: str, *, worker: str | None = None, timeout: float | None = None
    ) -> SlotFile:
        """Save the tokens and KV cells of the job that runs in a slot, or ran there last, where its worker runs.

        A state that has the name already is replaced. Where several workers serve the queue, `worker` names one.
        Raises `OrderRefused`, `InvalidRequest`, `NoWorker`, `ResultTimeout`.
        """
        order = slot_commands.check_order(SlotAction.SAVE, slot, name)
        return (await self._ask_one(worker, order, timeout)).files[0]

    async def restore_slot(
        self, slot: int, name: str, *, worker: str | None = None, timeout: float | None = None
    ) -> SlotFile:
        """Load a saved state into the worker's prefix cache, as the content of an idle slot.

        Jobs that begin like it, and have the salt of the job that it was saved from, do not compute it again. Raises
        what `save_slot` raises.
        """
        order = slot_commands.check_order(SlotAction.RESTORE, slot, name)
        return (await self._ask_one(worker, order, timeout)).files[0]

    async def erase_slot(self, slot: int, *, worker: str | None = None, timeout: float | None = None) -> int:
        """Have a worker forget the content of an idle slot, but for beginnings that others share; returns its tokens.

        Raises what `save_slot` raises.
        """
        order = slot_commands.check_order(SlotAction.ERASE, slot)
        return (await self._ask_one(worker, order, timeout)).n_tokens

    async def erase_saved_slot(self, name: str, *, worker: str | None = None, timeout: float | None = None) -> None:
        """Delete a saved state. Raises what `save_slot` raises."""
        order = slot_commands.check_order(SlotAction.ERASE, name=name)
        await self._ask_one(worker, order, timeout)

    async def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that the queue's workers have, for use in this process.

        Raises `NoWorker`, and `MissingExtra` without `llamaq[tokenizer]`.
        """
        workers = await self.workers()
        if not workers:
            raise NoWorker(self.queue)
        return await load_tokenizer(self.redis, self.keys, workers[0].card)

    async def _ask_one(self, worker: str | None, order: SlotCommand, timeout: float | None) -> SlotReply:
        chosen = slot_commands.choose_worker(await self.workers(), self.queue, worker)
        return await self._ask(chosen, order, timeout)

    async def _ask(self, worker: str, order: SlotCommand, timeout: float | None) -> SlotReply:
        timeout_s = self.settings.timeout_s if timeout is None else timeout
        return await slot_commands.ask(self.redis, self.keys, worker, order, timeout_s)

    def _request(self, options: JobOptions, **more: Any) -> JobRequest:
        """`more` are a prompt, and defaults that `options` may override."""
        values = {**more, **options}
        if values.get("seed") is None:
            values["seed"] = secrets.randbits(SEED_BITS)
        return codec.build_request(values)

    async def _submit(self, request: JobRequest, job_id: JobId | None = None) -> AsyncJob:
        payload = codec.encode_request(request, self.settings.max_request_bytes)
        job_id = job_id or JobId.new(self.queue, self.settings.partitions, request.idempotency_key)
        try:
            outcome = await self._scripts.submit(job_id, request, payload, result_ttl_s=self.settings.result_ttl_s)
        except ResponseError as exc:
            if is_full(exc):
                raise RedisFull(job_id.queue) from exc
            raise
        if isinstance(outcome, Refused):
            raise QueueFull(job_id.queue, outcome.depth, outcome.max_queue, await self._estimate_wait(outcome.depth))
        log.debug("job.submitted id=%s existing=%s bytes=%d", outcome.job_id, outcome.existing, len(payload))
        return AsyncJob(self.connection, outcome.job_id, is_new=not outcome.existing)

    async def _estimate_wait(self, depth: int) -> float | None:
        """For a job behind `depth` others of its partition; the rate is that of all partitions."""
        n_ahead = depth * self.settings.partitions
        with suppress(RedisError, OSError):  # that the queue is full is known all the same
            return await queue_snapshots.estimate_wait(self.redis, self.keys, self.queue, n_ahead)
        return None

    async def _submit_owned(self, request: JobRequest) -> AsyncJob:
        """Submit so that a caller who is cancelled meanwhile leaves no job behind."""
        submitting = self._background.start(self._submit(request))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            self._background.start(self._abandon_when_submitted(submitting))
            raise

    async def _generate(self, request: JobRequest, timeout: float | None) -> Result:
        job = await self._submit_owned(request)
        try:
            return await job.result(timeout=timeout)
        except ResultTimeout as exc:
            await self._abandon(job)
            raise await self._explain_timeout(exc) from exc
        except (asyncio.CancelledError, RedisError, OSError):
            self._background.start(self._abandon(job))
            raise

    async def _stream(self, request: JobRequest, timeout: float | None) -> AsyncGenerator[Chunk, None]:
        job = await self._submit_owned(request)
        chunks = job.stream(timeout=timeout)
        has_ended = False
        try:
            async for chunk in chunks:
                yield chunk
            has_ended = True
        except (JobFailed, JobNotFound):
            has_ended = True
            raise
        except ResultTimeout as exc:
            raise await self._explain_timeout(exc) from exc
        finally:
            await chunks.aclose()
            if not has_ended:
                # A task of its own: whoever closes this stream may be cancelled meanwhile.
                await asyncio.shield(self._background.start(self._abandon(job)))

    async def _explain_timeout(self, exc: ResultTimeout) -> LlamaqError:
        return exc if await self.workers() else NoWorker(self.queue)

    async def _abandon(self, job: AsyncJob) -> None:
        """Cancel a job that nobody waits for any more; one that others share goes on."""
        if not job.is_new:
            return
        try:
            await job.cancel()
        except JobNotFound:
            pass
        except (RedisError, OSError) as exc:
            log.warning("job.not_cancelled id=%s error=%s", job.id, exc)

    async def _abandon_when_submitted(self, submitting: asyncio.Task[AsyncJob]) -> None:
        await self._abandon(await submitting)
