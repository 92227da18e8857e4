"""The asyncio client: submits jobs to a queue and follows them. `llamaq.producer.sync` is generated from it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from pydantic import JsonValue
from redis.asyncio import Redis

from llamaq.common.errors import DeadLetterNotFound, NoWorker
from llamaq.common.protocol.chat import Message
from llamaq.common.protocol.embedding import Embedding, Normalization
from llamaq.common.protocol.job_outcome import JobState, Result
from llamaq.common.protocol.job_request import JobOptions, Priority
from llamaq.common.protocol.job_snapshots import DeadLetter, DeadLetterDetails, JobSummary
from llamaq.common.protocol.queue_config import QueueMode
from llamaq.common.protocol.queue_mode import set_queue_mode
from llamaq.common.protocol.slot_commands import SlotAction, SlotFile, WorkerSlots
from llamaq.common.protocol.snapshots import QueueDepth, QueueStats, QueueSummary, Worker, WorkerCard
from llamaq.common.protocol.text_commands import TextAction
from llamaq.common.settings import client_settings
from llamaq.producer import batch, embeddings, submission
from llamaq.producer.answer_forms import AnswerForms
from llamaq.producer.async_stream import AsyncStream
from llamaq.producer.auto_cancelled_jobs import AutoCancelledJobs
from llamaq.producer.chat_answers import ChatAnswers, read_form
from llamaq.producer.embeddings import EmbeddingInputs, EmbeddingOptions, RankedDocument
from llamaq.producer.job import AsyncJob
from llamaq.producer.map_call import MapCall
from llamaq.producer.queries import dead_letters, job_list, queue_list, queue_snapshots, slot_commands, text_commands
from llamaq.producer.queue_connection import QueueConnection
from llamaq.producer.streaming.subscriber import Subscriber
from llamaq.producer.submission import build_request
from llamaq.producer.tokenizer import Tokenizer, load_tokenizer

Messages = Sequence[Message | Mapping[str, Any]]
"""A chat, as `Message` objects or as mappings such as `{"role": "user", "content": "hi"}`.

A content may also be a list of parts such as `{"type": "text", "text": "hi"}`.
"""


class JobArguments(JobOptions, total=False):
    """The arguments of `submit` for one job of `submit_many`: a prompt and job options."""

    prompt: str
    tokens: Sequence[int]
    messages: Messages


class AsyncClient(MapCall):
    """A client for one queue. It connects to Redis at the first call.

        async with AsyncClient("redis://localhost:6379/0") as client:
            async for chunk in await client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="", flush=True)

    One client serves any number of concurrent calls, in one event loop at a time.

    `ClientSettings` documents the settings with their units, bounds and defaults. An argument that is None is read
    from its `LLAMAQ_*` environment variable, and otherwise has the default.

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
        self.settings = client_settings(
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
        self.queue = self.settings.queue
        self.connection = QueueConnection(self.settings)
        self.keys = self.connection.keys
        self.auto_cancelled = AutoCancelledJobs(self.connection)
        self._answer_forms = AnswerForms(self._chat_template)

    def __repr__(self) -> str:
        return f"<AsyncClient queue={self.queue!r} {self.connection!r}>"

    @property
    def redis(self) -> Redis:
        """The connections to Redis, for commands of your own."""
        return self.connection.redis

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
        """Close all open streams, then all connections. Jobs of `submit` keep running."""
        await self.auto_cancelled.close_streams()
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

    async def chat_answers(
        self,
        messages: Messages,
        *,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        **options: Unpack[JobOptions],
    ) -> ChatAnswers:
        """Return how the model writes its answers to a chat, to tell reasoning and calls of tools from the content.

            answers = client.chat_answers(messages, tools=tools)
            answer = answers.read(client.chat(messages, **answers.options))
            print(answer.reasoning, answer.content, answer.tool_calls)

        The parts of a stream are `answers.parts(client.stream_chat(messages, **answers.options))`.

        Args:
            messages: The messages, oldest first.
            tool_choice: `auto`: the model decides whether it calls a tool. `none`: it has no tools. `required`, or
                `{"type": "function", "function": {"name": NAME}}`: it must call a tool, or this tool.
            parallel_tool_calls: Whether a demanded call may be followed by further ones.
            **options: Job options for the chat, `tools` among them; `JobParams` documents each of them.

        Returns:
            The job options for the chat, and what splits its answer.

        Raises:
            InvalidRequest: The tools or their choice are not valid.
            NoWorker: No worker serves the queue.
        """
        choice = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        return await read_form(self._answer_forms, self.connection, messages, options, choice)

    async def embed(
        self,
        inputs: EmbeddingInputs,
        *,
        dimensions: int | None = None,
        normalization: Normalization | Literal["euclidean", "taxicab", "max_absolute", "none"] | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> tuple[Embedding, ...]:
        """Compute the embeddings of texts, on a queue whose workers run with `--embeddings`.

            for embedding in client.embed(["one text", "another"]):
                print(embedding.vector)

        Each job computes at most 32 texts. A job of the call that has not ended is cancelled when the call fails, times
        out or is interrupted, unless the call has an idempotency key.

        Args:
            inputs: A text, a list of token ids, or a list of texts and lists of token ids. No token is added to token
                ids.
            dimensions: How many numbers of each embedding are returned, from the first on, for models that were trained
                for it. None: all.
            normalization: How embeddings are scaled. None: to the Euclidean length 1.
            timeout: Longest wait for the embeddings in seconds. None: the client's `timeout_s`.
            **options: Job options.

        Returns:
            One embedding for each input, in their order: `vector` is a list of floats, `data` the same as bytes, and
            `n_tokens` the number of tokens.

        Raises:
            InvalidRequest: An argument is not valid.
            OtherKindOfQueue: The workers of the queue run without `--embeddings`. Nothing was submitted.
            JobFailed: A text is too long for the workers, or a job failed for another reason.
            LlamaqError: The other errors of `generate`.
        """
        task = {"dimensions": dimensions, "normalization": normalization}
        tasks = embeddings.split_task(embeddings.as_list(inputs), **task)
        return await embeddings.compute(self.auto_cancelled, tasks, options, timeout)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> tuple[RankedDocument, ...]:
        """Sort documents by how well they answer a query, on a queue with a model for reranking (`--pooling rank`).

        Args:
            query: The query.
            documents: The documents.
            top_n: Largest number of documents to return. None: all.
            timeout: Longest wait for the scores in seconds. None: the client's `timeout_s`.
            **options: Job options.

        Returns:
            For each document its `index` in `documents`, its `score`, and its number of tokens. The best one is first.

        Raises:
            LlamaqError: The same errors as `embed`.
        """
        tasks = embeddings.split_task(embeddings.as_list(documents), query=query)
        return embeddings.rank(await embeddings.compute(self.auto_cancelled, tasks, options, timeout), top_n)

    async def stream(self, prompt: str, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> AsyncStream:
        """Submit a text prompt and return the stream of the generated text in chunks.

        A web backend gets the errors of the submit here, and those until the first chunk from `started` of the stream,
        before it starts a response. The job is cancelled when the stream ends early, see `AsyncStream`.

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

        All jobs are validated first: if one is not valid, none is submitted. Redis then accepts or refuses each job on
        its own, as it does for `submit`.

        Args:
            jobs: The arguments of `submit` for each job.
            durable: Number of replicas of Redis that must have the jobs, as for `submit`.

        Raises:
            InvalidRequest: A job is not valid. The message begins with its index, such as `jobs[3]`. No job was
                submitted.
            NoWorker: The client has `require_worker`, and no worker serves the queue. No job was submitted.
            BatchIncomplete: Some jobs were refused, for example with `QueueFull`. For each job, `errors` has the
                reason, or `job_ids` has its id. The jobs with an id were submitted. `__cause__` is a `NotDurable` if
                too few replicas have confirmed these.
            NotDurable: Fewer than `durable` replicas have confirmed the jobs. The jobs were submitted; `job_ids` are
                their ids.
            ResultTimeout: Redis has not answered within the client's `timeout_s`. It may have some of the jobs.
        """
        return await batch.submit_many(self.connection, jobs, durable)

    def job(self, job_id: str) -> AsyncJob:
        """Return the handle of a submitted job. Another process may have submitted the job, to any queue.

        Args:
            job_id: The id of the job. The call does not check whether the job exists.

        Raises:
            InvalidRequest: `job_id` does not have the form of a job id.
        """
        return AsyncJob(self.connection, job_id)

    async def cancel(self, job_id: str) -> bool:
        """Request the cancellation of a job. See `AsyncJob.cancel`.

        Args:
            job_id: The id of the job, in any queue.

        Returns:
            True if the job will be cancelled, False if it had already finished or failed.

        Raises:
            JobNotFound: The id is wrong, or the result has expired.
            InvalidRequest: `job_id` does not have the form of a job id.
        """
        return await self.job(job_id).cancel()

    async def queue_depth(self) -> QueueDepth:
        """Return the numbers of waiting and running jobs in the queue. Jobs that have reached a deadline end first."""
        return await queue_snapshots.read_depth(self.connection, self.queue, self.settings.partitions)

    async def pause(self) -> None:
        """Pause the queue: no job gets its first slot until `resume`.

        Jobs that have a slot, or had one, continue, also on another worker. Jobs are still accepted. Their deadlines
        count. `queue_depth().mode` tells the mode of the queue.
        """
        await self._set_mode(QueueMode.PAUSED)

    async def drain(self) -> None:
        """Drain the queue: until `resume`, `submit` raises `QueueDraining`, and workers run the jobs in the queue.

        A queue is either paused or drained: draining a paused queue starts its jobs.
        """
        await self._set_mode(QueueMode.DRAINING)

    async def resume(self) -> None:
        """End `pause` and `drain`. Workers claim the waiting jobs within half a second."""
        await self._set_mode(QueueMode.OPEN)

    async def _set_mode(self, mode: QueueMode) -> None:
        await set_queue_mode(self.redis, self.keys, self.queue, self.settings.partitions, mode)

    async def queues(self) -> tuple[QueueSummary, ...]:
        """Return all queues with this client's `key_prefix`, sorted by name, also those that no worker serves.

        A queue exists from its first job or worker on. The call examines all keys of the Redis server, and finds at
        most 10,000 partitions.
        """
        return await queue_list.read_queues(self.connection)

    async def jobs(
        self,
        *,
        state: JobState | None = None,
        priority: Priority | None = None,
        older_than_s: float | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
        tenant: str | None = None,
        limit: int = 100,
    ) -> tuple[JobSummary, ...]:
        """Return the waiting and running jobs of the queue, oldest first. Jobs that have reached a deadline end first.

        Args:
            state: `QUEUED` or `RUNNING`. None: both.
            priority: Only jobs of this priority. None: all.
            older_than_s: Only jobs that were submitted longer ago, in seconds. None: all.
            metadata: Only jobs whose metadata has these keys and values. A text also matches a number or boolean that
                is written so.
            tenant: Only jobs of this tenant. None: all.
            limit: Largest number of jobs.

        Raises:
            InvalidRequest: `state` is `FINISHED` or `FAILED`. Such jobs are not in the queue any more.
        """
        wanted = job_list.JobFilter(state, priority, older_than_s, metadata or {}, tenant)
        return await job_list.read_jobs(self.connection, wanted, limit)

    async def purge(
        self,
        *,
        priority: Priority | None = None,
        older_than_s: float | None = None,
        metadata: Mapping[str, JsonValue] | None = None,
        tenant: str | None = None,
        dry_run: bool = False,
    ) -> tuple[str, ...]:
        """Cancel the waiting jobs of the queue that match all arguments. Without arguments, cancel all waiting jobs.

        Each job finishes with the reason `cancelled`, which its readers receive. Running jobs continue.

        Args:
            priority: Only jobs of this priority. None: all.
            older_than_s: Only jobs that were submitted longer ago, in seconds. None: all.
            metadata: Only jobs whose metadata has these keys and values. A text also matches a number or boolean that
                is written so.
            tenant: Only jobs of this tenant. None: all.
            dry_run: If true, cancel nothing, and return the matching jobs.

        Returns:
            The ids of the cancelled jobs. With `dry_run`, the ids of the matching jobs.
        """
        wanted = job_list.JobFilter(JobState.QUEUED, priority, older_than_s, metadata or {}, tenant)
        return await job_list.purge(self.connection, wanted, dry_run=dry_run)

    async def workers(self) -> tuple[Worker, ...]:
        """Return the card and the last heartbeat of each live worker of the queue, sorted by worker id."""
        return await queue_snapshots.read_workers(self.redis, self.keys, self.queue)

    async def stats(self) -> QueueStats:
        """Return the queue's depth, its live workers, and up to 100 jobs that ended last, newest first."""
        depth, workers, recent = await asyncio.gather(
            self.queue_depth(), self.workers(), queue_snapshots.read_recent(self.redis, self.keys, self.queue)
        )
        return QueueStats(queue=self.queue, depth=depth, workers=workers, recent=recent)

    async def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Return the dead letters of the queue, newest first.

        A dead letter is a job during which several workers crashed, one after the other, or a stream entry that is not
        a job.
        """
        return await dead_letters.read_all(self.redis, self.keys, self.queue, self.settings.partitions)

    async def dead_letter(self, letter_id: str) -> DeadLetterDetails:
        """Return one dead letter, with its request and its generated tokens unless they have expired.

        Args:
            letter_id: The `id` of a dead letter, in any queue.

        Raises:
            DeadLetterNotFound: The letter was retried or purged, or never existed.
            InvalidRequest: `letter_id` does not have the form of a dead letter's id.
        """
        return await dead_letters.read_details(self.redis, self.keys, letter_id)

    async def retry_dead_letter(self, letter_id: str) -> AsyncJob:
        """Submit the job of a dead letter again as a new job, and remove the letter.

        The new job starts from its prompt, with the same request, seed and metadata. The idempotency key stays with
        the old job. Concurrent retries of one letter return the same new job.

        Args:
            letter_id: The `id` of a dead letter, in any queue.

        Returns:
            The handle of the new job.

        Raises:
            DeadLetterNotFound: The letter was retried or purged, or never existed.
            JobNotFound: The request has expired.
            InvalidRequest: The letter is not a job, or `letter_id` does not have the form of a dead letter's id.
            QueueFull: The queue has `max_queue` waiting jobs.
            RedisFull: Redis has reached its `maxmemory`.
        """
        return await submission.retry_dead_letter(self.connection, letter_id)

    async def purge_dead_letter(self, letter_id: str) -> None:
        """Remove a dead letter. Its job then expires after `result_ttl_s`, like every other job.

        Args:
            letter_id: The `id` of a dead letter, in any queue.

        Raises:
            DeadLetterNotFound: The letter was retried or purged, or never existed.
            InvalidRequest: `letter_id` does not have the form of a dead letter's id.
        """
        queue, letter = await dead_letters.find(self.redis, self.keys, letter_id)
        if not await self.connection.scripts.purge(queue, letter.partition, letter.entry, letter.job_id):
            raise DeadLetterNotFound(letter_id)

    async def slots(self, *, worker: str | None = None, timeout: float | None = None) -> tuple[WorkerSlots, ...]:
        """Return the slots of the queue's workers, and the slot states that are saved on their hosts.

        Args:
            worker: The id of one worker. None: all workers of the queue.
            timeout: Longest wait for the replies in seconds. None: the client's `timeout_s`.

        Returns:
            One object for each worker.

        Raises:
            NoWorker: No worker serves the queue.
            InvalidRequest: `worker` does not serve the queue.
            SlotCommandRefused: A worker ended before it replied.
            ResultTimeout: A reply did not arrive in time.
        """
        return await slot_commands.list_slots(self.connection, worker, timeout)

    async def save_slot(
        self, slot: int, name: str, *, worker: str | None = None, timeout: float | None = None
    ) -> SlotFile:
        """Save the tokens and KV cells of the running or last job of a slot, in a file on the worker's host.

        A saved state with the same name is replaced.

        Args:
            slot: The index of the slot, from 0 on.
            name: The name of the saved state: 1 to 64 letters, digits, `_` and `-`.
            worker: The id of the worker. None: the only worker of the queue.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The name and size of the saved state.

        Raises:
            SlotCommandRefused: The worker refused the command, or ended before it replied.
            InvalidRequest: An argument is not valid, or `worker` is None and several workers serve the queue.
            NoWorker: No worker serves the queue.
            ResultTimeout: The reply did not arrive in time.
        """
        command = slot_commands.build_command(SlotAction.SAVE, slot, name)
        return (await slot_commands.send_to_one(self.connection, worker, command, timeout)).files[0]

    async def restore_slot(
        self, slot: int, name: str, *, worker: str | None = None, timeout: float | None = None
    ) -> SlotFile:
        """Load a saved state into an idle slot, and into the worker's prefix cache.

        If the prompt of a later job begins with the same tokens and the job has the same cache salt, it reuses their KV
        cells.

        Args:
            slot: The index of the slot, from 0 on.
            name: The name of the saved state.
            worker: The id of the worker. None: the only worker of the queue.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The name and size of the saved state.

        Raises:
            LlamaqError: The same errors as `save_slot`.
        """
        command = slot_commands.build_command(SlotAction.RESTORE, slot, name)
        return (await slot_commands.send_to_one(self.connection, worker, command, timeout)).files[0]

    async def erase_slot(self, slot: int, *, worker: str | None = None, timeout: float | None = None) -> int:
        """Evict the tokens of an idle slot from the KV cache. A prefix that other sequences share stays cached.

        Args:
            slot: The index of the slot, from 0 on.
            worker: The id of the worker. None: the only worker of the queue.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The number of tokens that the slot had.

        Raises:
            LlamaqError: The same errors as `save_slot`.
        """
        command = slot_commands.build_command(SlotAction.ERASE, slot)
        return (await slot_commands.send_to_one(self.connection, worker, command, timeout)).n_tokens

    async def erase_saved_slot(self, name: str, *, worker: str | None = None, timeout: float | None = None) -> None:
        """Delete a saved state from the worker's host.

        Args:
            name: The name of the saved state.
            worker: The id of the worker. None: the only worker of the queue.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Raises:
            LlamaqError: The same errors as `save_slot`.
        """
        command = slot_commands.build_command(SlotAction.ERASE, name=name)
        await slot_commands.send_to_one(self.connection, worker, command, timeout)

    async def tokenize(self, text: str, *, timeout: float | None = None) -> list[int]:
        """Return the tokens of a text prompt, as a worker of the queue tokenizes it. llama.cpp is not needed here.

        Args:
            text: The text of the prompt. Special tokens in it are parsed.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The token ids. They start with the BOS token if the model's metadata requires it.

        Raises:
            InvalidRequest: The text is larger than `max_request_bytes`, or llama.cpp cannot tokenize it.
            NoWorker: No worker serves the queue.
            SlotCommandRefused: The worker ended before it replied.
            ResultTimeout: The reply did not arrive in time.
        """
        return list((await text_commands.ask(self.connection, TextAction.TOKENIZE, timeout, text=text)).tokens)

    async def tokenize_chat(self, messages: Messages, *, timeout: float | None = None) -> list[int]:
        """Return the tokens of a chat, as a worker of the queue renders and tokenizes it.

        Args:
            messages: The messages, oldest first. Special tokens in their contents are treated as text.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The token ids of the whole prompt.

        Raises:
            LlamaqError: The same errors as `tokenize`.
        """
        reply = await text_commands.ask(self.connection, TextAction.TOKENIZE, timeout, messages=messages)
        return list(reply.tokens)

    async def detokenize(self, tokens: Sequence[int], *, timeout: float | None = None) -> str:
        """Return the text of tokens, as a job of the queue streams it. Control tokens have no text.

        Args:
            tokens: Token ids of the model's vocabulary.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Raises:
            InvalidRequest: A token id is not in the vocabulary.
            LlamaqError: The other errors of `tokenize`.
        """
        return (await text_commands.ask(self.connection, TextAction.DETOKENIZE, timeout, tokens=tokens)).text

    async def apply_template(self, messages: Messages, *, timeout: float | None = None) -> str:
        """Return a chat as text, rendered with the chat template of the queue's model.

        Args:
            messages: The messages, oldest first.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The text of the prompt, which ends where the answer begins.

        Raises:
            InvalidRequest: The model has no chat template, or the template refuses the messages.
            LlamaqError: The other errors of `tokenize`.
        """
        return (await text_commands.ask(self.connection, TextAction.APPLY_TEMPLATE, timeout, messages=messages)).text

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the queue's model, for many texts in this process. It needs `llamaq[tokenizer]`.

        `tokenize`, `detokenize` and `apply_template` ask a worker instead, and need no extra.

        Returns:
            The tokenizer. It is downloaded from Redis once per process and model.

        Raises:
            NoWorker: No worker serves the queue.
            MissingExtra: `llamaq[tokenizer]` is not installed.
            ProtocolError: The vocabulary in Redis is damaged.
        """
        return await load_tokenizer(self.redis, self.keys, await self._worker_card())

    async def _worker_card(self) -> WorkerCard:
        workers = await self.workers()
        if not workers:
            raise NoWorker(self.queue)
        return workers[0].card

    async def _chat_template(self, _queue: str) -> str | None:
        return (await self._worker_card()).chat_template
