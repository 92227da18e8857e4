"""A fake worker without a model, for tests of code that uses llamaq. The test decides what each job generates.

    async with FakeWorker(url, queue="tests") as worker:
        await worker.announce()  # for clients with `require_worker=True`
        job = await client.submit("hello")
        attempt = await worker.start_next()
        await attempt.emit([1, 2], "one two")
        await attempt.finish()

`FakeWorker.serve` answers every job of a queue. `serving` does the same in a thread, for tests of blocking code.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Self

from redis.exceptions import RedisError, ResponseError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import JobFailed
from llamaq.common.protocol import codec
from llamaq.common.protocol.attempt_scripts import AttemptScripts
from llamaq.common.protocol.claim_scripts import ClaimScripts
from llamaq.common.protocol.embedding_task import Embedding
from llamaq.common.protocol.job_events import Failed, Finished
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot, RecentJob, Worker, WorkerCard
from llamaq.common.protocol.script_types import (
    Attempt,
    Claimant,
    ClaimCode,
    FinishReply,
    FlushReply,
    JobEntry,
    JobFlush,
    Reader,
    StreamEntries,
    TerminalWrite,
)
from llamaq.common.redis.connect import connect
from llamaq.producer.queries.job_records import read_output

Answer = Callable[[JobRequest], Iterable[str]]
"""Returns the answer to a request, in pieces of text. Each piece becomes one token, sent before the next is read.

A `JobFailed` that it raises fails this job alone.
"""

POLL_S = 0.01
LEASE_MS = 60_000
"""Lease of a job in milliseconds. A fake worker does not renew it, so the job then counts as waiting again."""


class FakeClaimScripts(ClaimScripts):
    """Reads entries without a claim of their jobs, and claims one job. Workers do both in one call, for many jobs."""

    async def read_unclaimed(self, stream: str, count: int, lease_ms: int) -> StreamEntries:
        """Take up to `count` new entries of a job stream for `lease_ms` milliseconds."""
        reader = Reader(Claimant("", lease_ms), "", {stream: 0})
        return dict(await self.read(reader, [stream], count, count)).get(stream, [])

    async def claim_job(
        self, entry: JobEntry, worker: str, lease_ms: int, *, at_risk: bool = True
    ) -> Attempt | ClaimCode:
        """Claim the job of one entry, see `claim_jobs`."""
        (outcome,) = await self.claim_jobs([entry], Claimant(worker, lease_ms), at_risk=at_risk)
        if isinstance(outcome, RedisError):
            raise outcome
        return outcome


class FakeAttemptScripts(AttemptScripts):
    """Ends one job. Workers end many in one call."""

    async def finish(self, last: JobFlush, terminal_write: TerminalWrite) -> FinishReply:
        """End one job, see `finish_jobs`."""
        (outcome,) = await self.finish_jobs([(last, terminal_write)])
        if isinstance(outcome, RedisError):
            raise outcome
        return outcome


class FakeWorker:
    """Claims the jobs of partition 0 of a queue. It belongs to one event loop.

    Args:
        url: The Redis URL.
        queue: The name of the queue.
        key_prefix: The prefix of every Redis key.
        name: The worker id.
    """

    def __init__(self, url: str, queue: str, *, key_prefix: str = "llamaq", name: str = "fake") -> None:
        self.name = name
        self.queue = queue
        self.keys = Keys(key_prefix)
        self.redis = connect(url, name="llamaq-fake-worker")
        self.claim_scripts = FakeClaimScripts(self.redis, self.keys)
        self.scripts = FakeAttemptScripts(self.redis, self.keys, name)
        self._streams = [self.keys.jobs(queue, 0, priority) for priority in Priority]

    async def __aenter__(self) -> Self:
        for stream in self._streams:
            try:
                await self.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except ResponseError as exc:
                if "BUSYGROUP" not in str(exc):
                    raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(RedisError):  # a server that has stopped lists no workers
            await self.redis.unlink(self.keys.worker(self.name))
        await self.redis.aclose()

    async def announce(
        self,
        *,
        vocab_hash: str = "0" * 64,
        now_ms: int | None = None,
        ttl_s: int = 3600,
        host: str = "localhost",
        tick_age_ms: int = 0,
    ) -> WorkerCard:
        """Store one heartbeat. `Client.workers` lists this worker until its context ends.

        Args:
            vocab_hash: SHA-256 of the vocabulary in hexadecimal digits.
            now_ms: Time of the heartbeat in milliseconds since the epoch. None: now.
            ttl_s: Seconds until the heartbeat expires.
            host: Name of the worker's host.
            tick_age_ms: Age of the last tick at the time of the heartbeat, in milliseconds.

        Returns:
            The card of this worker, as stored.
        """
        time_ms = time.time_ns() // 1_000_000
        beat_ms = time_ms if now_ms is None else now_ms
        card = WorkerCard(
            worker=self.name,
            queue=self.queue,
            model="fake",
            n_ctx=512,
            n_ctx_train=512,
            context_limit=512,
            n_vocab=256,
            n_parallel=4,
            quantization="F32",
            chat_template=None,
            vocab_hash=vocab_hash,
            host=host,
            pid=1,
            device="none",
            version="0",
            started_ms=beat_ms,
        )
        cache = CacheSnapshot(n_cells=512, reserved_cells=0)
        worker = Worker(card=card, cache=cache, heartbeat_ms=beat_ms, tick_age_ms=tick_age_ms)
        await self.redis.hset(self.keys.worker(self.name), "worker", codec.encode_model(worker))
        await self.redis.expire(self.keys.worker(self.name), ttl_s)
        await self.redis.zadd(self.keys.workers(self.queue), {self.name: beat_ms})
        await self.redis.zadd(self.keys.queues(), {self.queue: time_ms})
        return card

    async def claim(self) -> JobEntry | None:
        """Read the next entry of the queue, interactive jobs first. Returns None if no job waits."""
        for stream in self._streams:
            for entry_id, fields, _ in await self.claim_scripts.read_unclaimed(stream, 1, LEASE_MS):
                return JobEntry(fields[b"id"].decode(), stream, entry_id.decode())
        return None

    async def begin(self, claim: JobEntry) -> FakeAttempt | None:
        """Claim a job and start it, as a worker with a free slot does. Returns None if the job cannot be claimed."""
        claimed = await self.claim_scripts.claim_job(claim, self.name, LEASE_MS)
        if not isinstance(claimed, Attempt):
            return None
        attempt = FakeAttempt(self, claim, claimed)
        if claimed.generated:
            output = await read_output(self.redis, self.keys.of_job(claim.job_id))
            attempt.text, attempt.tokens = output.text, list(output.tokens)
        await attempt.emit([], "")
        return attempt

    async def start_next(self) -> FakeAttempt:
        """Wait for the next job and start it. Jobs that were cancelled or have expired are skipped."""
        while True:
            claim = await self.claim()
            attempt = await self.begin(claim) if claim else None
            if attempt is not None:
                return attempt
            await asyncio.sleep(POLL_S if claim is None else 0)

    async def serve(self, answer: Answer) -> None:
        """Answer the jobs of the queue, one after the other, until this task is cancelled.

        Each input of an embedding job has the embedding `fake_embedding`. If `answer` raises another error than
        `JobFailed`, the job fails with its text, and this method raises it.

        Args:
            answer: Called with the request of each other job. It returns the pieces of text of the answer.
        """
        await self.announce()
        while True:
            attempt = await self.start_next()
            if attempt.request.embed is not None:
                await attempt.finish(embeddings=[fake_embedding(each) for each in attempt.request.embed.inputs])
                continue
            try:
                await attempt.answer(answer(attempt.request))
            except JobFailed as exc:
                await attempt.fail(exc.code, exc.message)
            except RedisError:
                raise
            except Exception as exc:
                with suppress(asyncio.CancelledError):  # the caller gets the error in any case
                    await attempt.fail("internal", f"the answer of the fake worker failed: {exc!r}")
                raise


class FakeAttempt:
    """One attempt of a job, run by a `FakeWorker`."""

    def __init__(self, worker: FakeWorker, claim: JobEntry, claimed: Attempt) -> None:
        self.worker = worker
        self.claim = claim
        self.number = claimed.number
        """Number of the attempt, from 1 on."""
        self.request = codec.decode_request(claimed.request, codec.MAX_EVENT_BYTES)
        self.stored = claimed.generated
        """Number of tokens stored in Redis, those of earlier attempts included."""
        self.tokens: list[int] = []
        """Tokens of the job, those of earlier attempts included."""
        self.text = ""
        """Text of the job, that of earlier attempts included."""

    def increment(self, tokens: Sequence[int] = (), text: str = "", *, offset: int | None = None) -> JobFlush:
        """Return the arguments of a worker's call of the flush script for these tokens.

        Args:
            tokens: New token ids.
            text: New text.
            offset: Position of the first token in the job's output. None: the end of the stored tokens.
        """
        start = self.stored if offset is None else offset
        payload = codec.encode_tokens(start, list(tokens), len(self.text), text) if tokens or text else b""
        return JobFlush(
            self.claim.job_id, self.number, self.claim.stream, self.claim.entry_id, start, len(tokens), payload
        )

    async def emit(self, tokens: Sequence[int], text: str) -> FlushReply:
        """Store and publish new output of the job.

        Args:
            tokens: New token ids.
            text: New text.

        Returns:
            The reply of the flush script. Its `code` is "ok", "cancel" (the job was cancelled) or "lost" (another
            attempt has started).
        """
        increment = self.increment(tokens, text)
        reply = (await self.worker.scripts.flush([increment], LEASE_MS, renew=False))[0]
        if reply.code != "lost":
            self.stored = reply.stored
            self.tokens += tokens
            self.text += text
        return reply

    async def finish(
        self,
        reason: FinishReason = FinishReason.STOP,
        *,
        tokens: Sequence[int] = (),
        text: str = "",
        embeddings: Sequence[Embedding] | None = None,
    ) -> bool:
        """Finish the job.

        Args:
            reason: The finish reason.
            tokens: The last new token ids.
            text: The last new text.
            embeddings: The result of an embedding job. None: the job generates text.

        Returns:
            Whether the job has ended now. False: another attempt has started, or the job had ended.
        """
        last = self.increment(tokens, text)
        self.tokens += tokens
        self.text += text
        if not self.request.stream:  # such a job has no `tokens` events
            last = replace(last, payload=b"")
        stats = JobStats(
            generated_tokens=len(self.tokens),
            worker=self.worker.name,
            prompt_tokens=sum(each.n_tokens for each in embeddings or ()),
            mode="embed" if embeddings is not None else "stream" if self.request.stream else "generate",
        )
        output = (
            codec.encode_output(self.text, self.tokens) if embeddings is None else codec.encode_embeddings(embeddings)
        )
        fields: dict[str, bytes | str] = {
            "finish_reason": reason.value,
            "stats": codec.encode_model(stats),
            "output": output,
            "generated": str(len(self.tokens)),
        }
        event = Finished(finish_reason=reason, stats=stats, text_length=len(self.text))
        reply = await self.worker.scripts.finish(last, TerminalWrite(event, fields))
        await self._record(RecentJob(job_id=self.claim.job_id, finish_reason=reason, stats=stats))
        return reply.code == "ok"

    async def fail(self, code: str = "internal", message: str = "broken on purpose") -> bool:
        """Fail the job.

        Returns:
            Whether the job has ended now. False: another attempt has started, or the job had ended.
        """
        event = Failed(code=code, message=message)
        reply = await self.worker.scripts.finish(
            self.increment(), TerminalWrite(event, {"error": codec.encode_event(event)})
        )
        stats = JobStats(generated_tokens=len(self.tokens), worker=self.worker.name)
        await self._record(RecentJob(job_id=self.claim.job_id, error_code=code, stats=stats))
        return reply.code == "ok"

    async def _record(self, ended: RecentJob) -> None:
        """Add the job to those that `Client.stats` returns."""
        stream = self.worker.keys.stats(self.worker.queue)
        await self.worker.redis.xadd(stream, {"job": codec.encode_model(ended)}, maxlen=1000)

    async def answer(self, pieces: Iterable[str]) -> None:
        """Generate one token (0, 1, 2, …) for each piece of text, then finish. Stops early if the job is cancelled."""
        for number, piece in enumerate(pieces):
            if self.request.stream:
                reply = await self.emit([number], piece)
            else:
                reply = await self.emit([], "")
                self.tokens.append(number)
                self.text += piece
            if reply.code != "ok":
                await self.finish(FinishReason.CANCELLED)
                return
        await self.finish()


def fake_embedding(given: str | Sequence[int]) -> Embedding:
    """Return three numbers that depend on a text or its token ids alone. A word is one token."""
    text = given if isinstance(given, str) else " ".join(map(str, given))
    digest = hashlib.sha256(text.encode()).digest()
    return Embedding(len(text.split()), 1, struct.pack("<3f", *(byte / 255 for byte in digest[:3])))


@contextmanager
def serving(url: str, queue: str, answer: Answer, *, key_prefix: str = "llamaq") -> Iterator[None]:
    """Answer the jobs of a queue in a thread, within this context. `Client.workers` lists the worker meanwhile.

    The context raises the error of a worker that cannot start when it is entered, and the error of `answer` at its end.
    An error of the body is raised instead, with the error of `answer` as a note.

    Args:
        url: The Redis URL.
        queue: The name of the queue.
        answer: Called with the request of each job, in that thread. It returns the pieces of text of the answer.
        key_prefix: The prefix of every Redis key.
    """
    ready: Future[None] = Future()
    stopping: Future[None] = Future()

    async def serve() -> None:
        async with FakeWorker(url, queue, key_prefix=key_prefix, name=f"fake-{queue}") as worker:
            await worker.announce()
            answering = asyncio.create_task(worker.serve(answer))
            stopped = asyncio.wrap_future(stopping)
            ready.set_result(None)
            await asyncio.wait([answering, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            await cancel_tasks(answering)
            if not answering.cancelled():
                answering.result()

    with ThreadPoolExecutor(1, "llamaq-fake-worker") as executor:
        ended = executor.submit(asyncio.run, serve())
        wait([ready, ended], return_when=FIRST_COMPLETED)
        try:
            if ready.done():
                yield
        except BaseException as exc:
            stopping.cancel()
            if error := ended.exception():
                exc.add_note(f"The fake worker failed: {error!r}")
            raise
        stopping.cancel()
        ended.result()
