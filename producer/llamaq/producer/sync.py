"""The client for threads: every method runs the one of `AsyncClient` in an event loop of its own."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import AsyncGenerator, Generator, Sequence
from types import TracebackType
from typing import Self, Unpack

from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import JobOptions
from llamaq.common.protocol.job_status import DeadLetter, DeadLetterDetails, JobStatus
from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.queue_state import QueueDepth, QueueStats, Worker
from llamaq.common.protocol.slot_commands import SlotFile, WorkerSlots
from llamaq.common.settings import client_settings
from llamaq.producer.blocking_portal import BlockingPortal
from llamaq.producer.client import AsyncClient, Messages
from llamaq.producer.job import AsyncJob, Chunk
from llamaq.producer.tokenizer import Tokenizer

_starting = threading.Lock()
_left_behind: list[BlockingPortal] = []
"""Portals of a parent process. Never collected: closing their loops here would take the parent's sockets away."""


def _after_fork() -> None:
    """Another thread of the parent may have held the lock."""
    global _starting  # noqa: PLW0603
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Client:
    """`AsyncClient` for threads: the same methods with the same parameters, and iterators for its async iterators.

    May be used by several threads at once, and after a fork by the child too. It starts one thread at the first call,
    which `close` ends.

        with Client("redis://localhost:6379/0") as client:
            for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="", flush=True)
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
        self._make_client()  # so that a bad URL is an error here, not at the first call
        self._portal: BlockingPortal | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Client queue={self.queue!r} {'closed' if self._is_closed else self._portal or 'idle'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the calls that other threads are in, and close all connections. Submitted jobs go on."""
        self._is_closed = True
        if self._portal is not None:
            self._portal.stop()

    def generate(self, prompt: str, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Result:
        """See `AsyncClient.generate`."""
        portal = self._enter()
        return portal.run(portal.client.generate(prompt, timeout=timeout, **options))

    def generate_tokens(
        self, tokens: Sequence[int], *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Result:
        """See `AsyncClient.generate_tokens`."""
        portal = self._enter()
        return portal.run(portal.client.generate_tokens(tokens, timeout=timeout, **options))

    def chat(self, messages: Messages, *, timeout: float | None = None, **options: Unpack[JobOptions]) -> Result:
        """See `AsyncClient.chat`."""
        portal = self._enter()
        return portal.run(portal.client.chat(messages, timeout=timeout, **options))

    def stream(
        self, prompt: str, *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Generator[Chunk, None, None]:
        """See `AsyncClient.stream`."""
        portal = self._enter()
        return self._iterate(portal, portal.client.stream(prompt, timeout=timeout, **options))

    def stream_tokens(
        self, tokens: Sequence[int], *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Generator[Chunk, None, None]:
        """See `AsyncClient.stream_tokens`."""
        portal = self._enter()
        return self._iterate(portal, portal.client.stream_tokens(tokens, timeout=timeout, **options))

    def stream_chat(
        self, messages: Messages, *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Generator[Chunk, None, None]:
        """See `AsyncClient.stream_chat`."""
        portal = self._enter()
        return self._iterate(portal, portal.client.stream_chat(messages, timeout=timeout, **options))

    def submit(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Messages | None = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """See `AsyncClient.submit`."""
        portal = self._enter()
        job = portal.run(portal.client.submit(prompt, tokens=tokens, messages=messages, **options))
        return Job(self, job.id, is_new=job.is_new)

    def job(self, job_id: str) -> Job:
        """See `AsyncClient.job`."""
        return Job(self, str(JobId.parse(job_id)))

    def cancel(self, job_id: str) -> bool:
        """See `AsyncClient.cancel`."""
        portal = self._enter()
        return portal.run(portal.client.cancel(job_id))

    def queue_depth(self) -> QueueDepth:
        """See `AsyncClient.queue_depth`."""
        portal = self._enter()
        return portal.run(portal.client.queue_depth())

    def workers(self) -> tuple[Worker, ...]:
        """See `AsyncClient.workers`."""
        portal = self._enter()
        return portal.run(portal.client.workers())

    def stats(self) -> QueueStats:
        """See `AsyncClient.stats`."""
        portal = self._enter()
        return portal.run(portal.client.stats())

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """See `AsyncClient.dead_letters`."""
        portal = self._enter()
        return portal.run(portal.client.dead_letters())

    def dead_letter(self, letter_id: str) -> DeadLetterDetails:
        """See `AsyncClient.dead_letter`."""
        portal = self._enter()
        return portal.run(portal.client.dead_letter(letter_id))

    def retry_dead_letter(self, letter_id: str) -> Job:
        """See `AsyncClient.retry_dead_letter`."""
        portal = self._enter()
        job = portal.run(portal.client.retry_dead_letter(letter_id))
        return Job(self, job.id, is_new=job.is_new)

    def purge_dead_letter(self, letter_id: str) -> None:
        """See `AsyncClient.purge_dead_letter`."""
        portal = self._enter()
        portal.run(portal.client.purge_dead_letter(letter_id))

    def slots(self, *, worker: str | None = None, timeout: float | None = None) -> tuple[WorkerSlots, ...]:
        """See `AsyncClient.slots`."""
        portal = self._enter()
        return portal.run(portal.client.slots(worker=worker, timeout=timeout))

    def save_slot(self, slot: int, name: str, *, worker: str | None = None, timeout: float | None = None) -> SlotFile:
        """See `AsyncClient.save_slot`."""
        portal = self._enter()
        return portal.run(portal.client.save_slot(slot, name, worker=worker, timeout=timeout))

    def restore_slot(
        self, slot: int, name: str, *, worker: str | None = None, timeout: float | None = None
    ) -> SlotFile:
        """See `AsyncClient.restore_slot`."""
        portal = self._enter()
        return portal.run(portal.client.restore_slot(slot, name, worker=worker, timeout=timeout))

    def erase_slot(self, slot: int, *, worker: str | None = None, timeout: float | None = None) -> int:
        """See `AsyncClient.erase_slot`."""
        portal = self._enter()
        return portal.run(portal.client.erase_slot(slot, worker=worker, timeout=timeout))

    def erase_saved_slot(self, name: str, *, worker: str | None = None, timeout: float | None = None) -> None:
        """See `AsyncClient.erase_saved_slot`."""
        portal = self._enter()
        portal.run(portal.client.erase_saved_slot(name, worker=worker, timeout=timeout))

    def tokenizer(self) -> Tokenizer:
        """See `AsyncClient.tokenizer`."""
        portal = self._enter()
        return portal.run(portal.client.tokenizer())

    def _iterate(self, portal: BlockingPortal, chunks: AsyncGenerator[Chunk, None]) -> Generator[Chunk, None, None]:
        # A method, so that the iterator keeps this client alive: `for chunk in Client().stream(...)`.
        yield from portal.iterate(chunks)

    def _make_client(self) -> AsyncClient:
        others = self.settings.model_dump(exclude={"redis_url", "queue"})
        return AsyncClient(self.settings.redis_url, self.settings.queue, **others)

    def _enter(self) -> BlockingPortal:
        """The running portal of this process. The finalizer also runs when the interpreter exits."""
        if self._is_closed:
            raise RuntimeError("this client is closed")
        if self._portal is not None and self._portal.is_of_this_process:
            return self._portal
        with _starting:
            if self._portal is None or not self._portal.is_of_this_process:
                if self._portal is not None:
                    _left_behind.append(self._portal)
                self._portal = BlockingPortal(self._make_client)
                weakref.finalize(self, self._portal.stop)
        return self._portal


class Job:
    """`AsyncJob` for threads."""

    def __init__(self, client: Client, job_id: str, *, is_new: bool = False) -> None:
        self.id = job_id
        self.is_new = is_new
        """Whether this submit made the job; False where an idempotency key had one, and after `client.job()`."""
        self._client = client

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def status(self) -> JobStatus:
        """See `AsyncJob.status`."""
        portal, job = self._enter()
        return portal.run(job.status())

    def cancel(self) -> bool:
        """See `AsyncJob.cancel`."""
        portal, job = self._enter()
        return portal.run(job.cancel())

    def result(self, *, timeout: float | None = None) -> Result:
        """See `AsyncJob.result`."""
        portal, job = self._enter()
        return portal.run(job.result(timeout=timeout))

    def stream(self, *, timeout: float | None = None) -> Generator[Chunk, None, None]:
        """See `AsyncJob.stream`."""
        portal, job = self._enter()
        return self._client._iterate(portal, job.stream(timeout=timeout))

    def _enter(self) -> tuple[BlockingPortal, AsyncJob]:
        portal = self._client._enter()
        return portal, AsyncJob(portal.client.connection, self.id, is_new=self.is_new)
