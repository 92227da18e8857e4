"""The client for threads: every method runs the same method of the asyncio client and waits for it."""

# Generated from client.py, job.py and async_stream.py by `python -m llamaq.tools.sync_client`: edit those files.

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, Unpack

from pydantic import JsonValue

from llamaq.common.protocol.embedding import Embedding, Normalization
from llamaq.common.protocol.job_outcome import JobState, Result
from llamaq.common.protocol.job_request import JobOptions, Priority
from llamaq.common.protocol.job_snapshots import DeadLetter, DeadLetterDetails, JobStatus, JobSummary
from llamaq.common.protocol.slot_commands import SlotFile, WorkerSlots
from llamaq.common.protocol.snapshots import QueueDepth, QueueStats, QueueSummary, Worker
from llamaq.producer.blocking_base import BlockingClient, BlockingJob, BlockingStream
from llamaq.producer.call_timeout import CallTimeout
from llamaq.producer.chat_answers import ChatAnswers
from llamaq.producer.client import AsyncClient, JobArguments, Messages
from llamaq.producer.embeddings import EmbeddingInputs, EmbeddingOptions, RankedDocument
from llamaq.producer.job import Chunk
from llamaq.producer.tokenizer import Tokenizer


class Client(BlockingClient):
    """A client for one queue. It connects to Redis at the first call.

        with Client("redis://localhost:6379/0") as client:
            for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="", flush=True)

    Threads may share one client, and a child process may use it after a fork. The first call starts a
    thread, which `close` ends.

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
        super().__init__(
            AsyncClient(
                url,
                queue,
                timeout_s=timeout_s,
                result_ttl_s=result_ttl_s,
                event_ttl_s=event_ttl_s,
                key_prefix=key_prefix,
                partitions=partitions,
                max_request_bytes=max_request_bytes,
                require_worker=require_worker,
                tenant=tenant,
            )
        )

    def generate(self, prompt: str, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Result:
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
        return self._call(lambda client: client.generate(prompt, timeout=timeout, **options))

    def generate_tokens(
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
        return self._call(lambda client: client.generate_tokens(tokens, timeout=timeout, **options))

    def chat(self, messages: Messages, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Result:
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
        return self._call(lambda client: client.chat(messages, timeout=timeout, **options))

    def chat_answers(
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
        return self._call(
            lambda client: client.chat_answers(
                messages, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, **options
            )
        )

    def embed(
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
        return self._call(
            lambda client: client.embed(
                inputs, dimensions=dimensions, normalization=normalization, timeout=timeout, **options
            )
        )

    def rerank(
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
        return self._call(lambda client: client.rerank(query, documents, top_n=top_n, timeout=timeout, **options))

    def stream(self, prompt: str, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Stream:
        """Submit a text prompt and return the stream of the generated text in chunks.

        A web backend gets the errors of the submit here, and those until the first chunk from `started` of the stream,
        before it starts a response. The job is cancelled when the stream ends early, see `Stream`.

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
        return Stream(self, self._open(lambda client: client.stream(prompt, timeout=timeout, **options)), Job)

    def stream_tokens(
        self, tokens: Sequence[int], *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Stream:
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
        return Stream(self, self._open(lambda client: client.stream_tokens(tokens, timeout=timeout, **options)), Job)

    def stream_chat(self, messages: Messages, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Stream:
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
        return Stream(self, self._open(lambda client: client.stream_chat(messages, timeout=timeout, **options)), Job)

    def submit(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Messages | None = None,
        durable: int = 0,
        **options: Unpack[JobOptions],
    ) -> Job:
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
        job = self._call(
            lambda client: client.submit(prompt, tokens=tokens, messages=messages, durable=durable, **options)
        )
        return Job(self, job.id, is_new=job.is_new, is_shared=job.is_shared)

    def submit_many(self, jobs: Sequence[JobArguments], *, durable: int = 0) -> tuple[Job, ...]:
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
        return tuple(
            Job(self, job.id, is_new=job.is_new, is_shared=job.is_shared)
            for job in self._call(lambda client: client.submit_many(jobs, durable=durable))
        )

    def job(self, job_id: str) -> Job:
        """Return the handle of a submitted job. Another process may have submitted the job, to any queue.

        Args:
            job_id: The id of the job. The call does not check whether the job exists.

        Raises:
            InvalidRequest: `job_id` does not have the form of a job id.
        """
        return Job(self, job_id)

    def cancel(self, job_id: str) -> bool:
        """Request the cancellation of a job. See `Job.cancel`.

        Args:
            job_id: The id of the job, in any queue.

        Returns:
            True if the job will be cancelled, False if it had already finished or failed.

        Raises:
            JobNotFound: The id is wrong, or the result has expired.
            InvalidRequest: `job_id` does not have the form of a job id.
        """
        return self._call(lambda client: client.cancel(job_id))

    def queue_depth(self) -> QueueDepth:
        """Return the numbers of waiting and running jobs in the queue. Jobs that have reached a deadline end first."""
        return self._call(lambda client: client.queue_depth())

    def pause(self) -> None:
        """Pause the queue: no job gets its first slot until `resume`.

        Jobs that have a slot, or had one, continue, also on another worker. Jobs are still accepted. Their deadlines
        count. `queue_depth().mode` tells the mode of the queue.
        """
        self._call(lambda client: client.pause())

    def drain(self) -> None:
        """Drain the queue: until `resume`, `submit` raises `QueueDraining`, and workers run the jobs in the queue.

        A queue is either paused or drained: draining a paused queue starts its jobs.
        """
        self._call(lambda client: client.drain())

    def resume(self) -> None:
        """End `pause` and `drain`. Workers claim the waiting jobs within half a second."""
        self._call(lambda client: client.resume())

    def queues(self) -> tuple[QueueSummary, ...]:
        """Return all queues with this client's `key_prefix`, sorted by name, also those that no worker serves.

        A queue exists from its first job or worker on. The call examines all keys of the Redis server, and finds at
        most 10,000 partitions.
        """
        return self._call(lambda client: client.queues())

    def jobs(
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
        return self._call(
            lambda client: client.jobs(
                state=state, priority=priority, older_than_s=older_than_s, metadata=metadata, tenant=tenant, limit=limit
            )
        )

    def purge(
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
        return self._call(
            lambda client: client.purge(
                priority=priority, older_than_s=older_than_s, metadata=metadata, tenant=tenant, dry_run=dry_run
            )
        )

    def workers(self) -> tuple[Worker, ...]:
        """Return the card and the last heartbeat of each live worker of the queue, sorted by worker id."""
        return self._call(lambda client: client.workers())

    def stats(self) -> QueueStats:
        """Return the queue's depth, its live workers, and up to 100 jobs that ended last, newest first."""
        return self._call(lambda client: client.stats())

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Return the dead letters of the queue, newest first.

        A dead letter is a job during which several workers crashed, one after the other, or a stream entry that is not
        a job.
        """
        return self._call(lambda client: client.dead_letters())

    def dead_letter(self, letter_id: str) -> DeadLetterDetails:
        """Return one dead letter, with its request and its generated tokens unless they have expired.

        Args:
            letter_id: The `id` of a dead letter, in any queue.

        Raises:
            DeadLetterNotFound: The letter was retried or purged, or never existed.
            InvalidRequest: `letter_id` does not have the form of a dead letter's id.
        """
        return self._call(lambda client: client.dead_letter(letter_id))

    def retry_dead_letter(self, letter_id: str) -> Job:
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
        job = self._call(lambda client: client.retry_dead_letter(letter_id))
        return Job(self, job.id, is_new=job.is_new, is_shared=job.is_shared)

    def purge_dead_letter(self, letter_id: str) -> None:
        """Remove a dead letter. Its job then expires after `result_ttl_s`, like every other job.

        Args:
            letter_id: The `id` of a dead letter, in any queue.

        Raises:
            DeadLetterNotFound: The letter was retried or purged, or never existed.
            InvalidRequest: `letter_id` does not have the form of a dead letter's id.
        """
        self._call(lambda client: client.purge_dead_letter(letter_id))

    def slots(self, *, worker: str | None = None, timeout: float | None = None) -> tuple[WorkerSlots, ...]:
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
        return self._call(lambda client: client.slots(worker=worker, timeout=timeout))

    def save_slot(self, slot: int, name: str, *, worker: str | None = None, timeout: float | None = None) -> SlotFile:
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
        return self._call(lambda client: client.save_slot(slot, name, worker=worker, timeout=timeout))

    def restore_slot(
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
        return self._call(lambda client: client.restore_slot(slot, name, worker=worker, timeout=timeout))

    def erase_slot(self, slot: int, *, worker: str | None = None, timeout: float | None = None) -> int:
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
        return self._call(lambda client: client.erase_slot(slot, worker=worker, timeout=timeout))

    def erase_saved_slot(self, name: str, *, worker: str | None = None, timeout: float | None = None) -> None:
        """Delete a saved state from the worker's host.

        Args:
            name: The name of the saved state.
            worker: The id of the worker. None: the only worker of the queue.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Raises:
            LlamaqError: The same errors as `save_slot`.
        """
        self._call(lambda client: client.erase_saved_slot(name, worker=worker, timeout=timeout))

    def tokenize(self, text: str, *, timeout: float | None = None) -> list[int]:
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
        return self._call(lambda client: client.tokenize(text, timeout=timeout))

    def tokenize_chat(self, messages: Messages, *, timeout: float | None = None) -> list[int]:
        """Return the tokens of a chat, as a worker of the queue renders and tokenizes it.

        Args:
            messages: The messages, oldest first. Special tokens in their contents are treated as text.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The token ids of the whole prompt.

        Raises:
            LlamaqError: The same errors as `tokenize`.
        """
        return self._call(lambda client: client.tokenize_chat(messages, timeout=timeout))

    def detokenize(self, tokens: Sequence[int], *, timeout: float | None = None) -> str:
        """Return the text of tokens, as a job of the queue streams it. Control tokens have no text.

        Args:
            tokens: Token ids of the model's vocabulary.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Raises:
            InvalidRequest: A token id is not in the vocabulary.
            LlamaqError: The other errors of `tokenize`.
        """
        return self._call(lambda client: client.detokenize(tokens, timeout=timeout))

    def apply_template(self, messages: Messages, *, timeout: float | None = None) -> str:
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
        return self._call(lambda client: client.apply_template(messages, timeout=timeout))

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the queue's model, for many texts in this process. It needs `llamaq[tokenizer]`.

        `tokenize`, `detokenize` and `apply_template` ask a worker instead, and need no extra.

        Returns:
            The tokenizer. It is downloaded from Redis once per process and model.

        Raises:
            NoWorker: No worker serves the queue.
            MissingExtra: `llamaq[tokenizer]` is not installed.
            ProtocolError: The vocabulary in Redis is damaged.
        """
        return self._call(lambda client: client.tokenizer())


class Job(BlockingJob):
    """A handle to a job. It has no state besides the job id, so any process may create one at any time.

    `Client.submit` and `Client.job` return handles.
    """

    def status(self) -> JobStatus:
        """Return a snapshot of the job: its state, progress, attempts, worker and times.

        A job that has reached a deadline ends at the latest now, also without a worker.

        Raises:
            JobNotFound: The id is wrong, or the result has expired.
        """
        return self._call(lambda job: job.status())

    def position(self) -> int | None:
        """Return how many jobs get a slot before this waiting job. `status().position` is the same number.

        The call is one short script in Redis, so it may be repeated for many jobs.

        Returns:
            The number. None: the job is not due, has a slot, has ended or does not exist.
        """
        return self._call(lambda job: job.position())

    def cancel(self) -> bool:
        """Request the job's cancellation.

        A waiting job finishes at once, a running job within a few ticks. The tokens generated so far are kept.

        Returns:
            True if the job will be cancelled, False if it had already finished or failed.

        Raises:
            JobNotFound: The id is wrong, or the result has expired.
        """
        return self._call(lambda job: job.cancel())

    def set_priority(self, priority: Priority | Literal["interactive", "bulk"]) -> bool:
        """Change the priority of a waiting job. The job then waits behind the other jobs of its new priority.

        Args:
            priority: The new priority.

        Returns:
            True if the job waits and has this priority now. False if it runs or has ended.

        Raises:
            InvalidRequest: There is no such priority.
            JobNotFound: The id is wrong, or the result has expired.
        """
        return self._call(lambda job: job.set_priority(priority))

    def result(self, *, timeout: float | None = None) -> Result:
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
        return self._call(lambda job: job.result(timeout=timeout))

    def stream(self, *, timeout: float | None = None) -> Generator[Chunk, None, None]:
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
            NoWorker: The client has `require_worker`, and no worker serves the queue.
        """
        return self._iterate(lambda job: job.stream(timeout=timeout))

    def result_within(self, limit: CallTimeout) -> Result:
        """Wait like `result`, within a timeout that has begun already."""
        return self._call(lambda job: job.result_within(limit))


class Stream(BlockingStream):
    """The chunks of a submitted job, in order. `Client.stream` returns it.

        stream = client.stream("Once upon a time")
        for chunk in stream:
            print(chunk.text, end="", flush=True)

    The job belongs to the stream. It is cancelled when the stream ends early: when it times out, when its reader is
    interrupted, when it is closed, or when nothing refers to it any more. A job with an
    idempotency key is never cancelled, because other callers may share it.
    """

    job: Job
    "The handle of the job, for example for its result after the last chunk."

    def text(self) -> Generator[str, None, None]:
        """Yield the text of each chunk that has text. Closing this iterator early closes the stream.

        Web frameworks accept it as the body of a response: `StreamingResponse(stream.text())`.
        """
        return self._iterate(lambda stream: stream.text())
