"""The outbox on a real Redis: checkpoints, requeued jobs, damaged keys, and a full Redis."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol import codec
from llamaq.common.protocol.attempt_script_calls import AttemptScripts
from llamaq.common.protocol.job_events import Started, Tokens
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.job_script_calls import JobScripts
from llamaq.common.protocol.keys import GROUP
from llamaq.common.protocol.script_types import Attempt, JobEntry, JobFlush
from llamaq.common.redis.write_refusals import is_full
from llamaq.producer import AsyncClient, AsyncJob, JobFailed
from llamaq.producer.queries.job_records import read_output
from llamaq.producer.testing import LEASE_MS, FakeWorker
from llamaq.worker.broker import outbox as outbox_module
from llamaq.worker.broker.job_progress import Checkpoints, RetryDelay
from llamaq.worker.broker.outbox import Outbox
from llamaq.worker.broker.upkeep_script_calls import UpkeepScripts
from llamaq.worker.core.job import Job, Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.core.outputs import JobEnded, NewToken, SlotAcquired
from llamaq.worker.engine_loop.output_mailbox import JobWithdrawn, OutputMailbox
from llamaq.worker.engine_loop.telemetry import EndedJob
from llamaq.worker.local.embedded_redis import EmbeddedRedis

NEVER = Checkpoints(tokens=10**6, every_s=10**6)
AT_ONCE = Checkpoints(tokens=10**6, every_s=0.0)


@dataclass
class RecordingEngine:
    """Records the calls of the outbox to the engine thread, and the stats of finished jobs."""

    cancelled: list[str] = field(default_factory=list)
    released: list[Lease] = field(default_factory=list)
    finished: list[EndedJob] = field(default_factory=list)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def release(self, lease: Lease) -> None:
        self.released.append(lease)

    def record(self, ended: EndedJob) -> None:
        self.finished.append(ended)


@dataclass
class Worker:
    """An outbox with its mailbox, a client, and a fake worker that claims jobs for the outbox."""

    client: AsyncClient
    claimer: FakeWorker
    outbox: Outbox
    outputs: OutputMailbox
    engine: RecordingEngine
    streams: bool
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """The claimed attempt of each job."""

    async def claim(
        self, metadata: dict[str, Any] | None = None, queue_timeout_s: float | None = None
    ) -> tuple[AsyncJob, Lease, JobRequest]:
        """Submit a job, and register it at the outbox as claimed."""
        job = await self.client.submit(
            "hello", stream=self.streams, metadata=metadata or {}, queue_timeout_s=queue_timeout_s
        )
        claim = await self.claimer.claim()
        assert claim is not None
        attempt = await self.claimer.claim_scripts.claim_job(claim, self.claimer.name, LEASE_MS)
        assert isinstance(attempt, Attempt)
        self.attempts[job.id] = attempt
        lease = Lease(job.id, 0, claim.stream, claim.entry_id, attempt.number)
        self.outbox.register(lease, attempt, JobTimes(submitted_s=time.monotonic()))
        return job, lease, codec.decode_request(attempt.request, codec.MAX_EVENT_BYTES)

    async def begin(self) -> tuple[AsyncJob, Job]:
        """Submit a job, and start it on the fake worker."""
        job, lease, request = await self.claim()
        unused = cast(Any, None)
        running = Job(lease, request, [1], sampler=unused, detokenizer=unused)
        assert self.outbox.set_prepared(PreparedJob(running, []))
        self.outputs.put([SlotAcquired(running)])
        await asyncio.sleep(0)
        await self.outbox.flush()
        return job, running

    async def put(self, job: Job, *tokens: int) -> None:
        """Put generated tokens into the mailbox. The text of each token is one letter."""
        self.outputs.put([NewToken(job, token, chr(ord("a") + token % 26), 0.0) for token in tokens])
        await asyncio.sleep(0)

    async def end(self, job: Job, n_tokens: int) -> None:
        stats = JobStats(generated_tokens=n_tokens)
        self.outputs.put([JobEnded(job, stats, reason=FinishReason.LENGTH)])
        await asyncio.sleep(0)

    async def events(self, job: AsyncJob) -> list[Any]:
        return (await self._read(job))[0]

    async def stored(self, job: AsyncJob) -> list[int]:
        """Return the stored tokens. Offsets have no gap and no repeat, and the count equals the one in the hash."""
        events, generated = await self._read(job)
        tokens: list[int] = []
        for event in events:
            if isinstance(event, Tokens):
                assert event.offset == len(tokens) == event.text_offset
                tokens += event.tokens
                assert len(event.text) == len(event.tokens)
        assert generated == len(tokens)
        return tokens

    async def _read(self, job: AsyncJob) -> tuple[list[Any], int]:
        """Return the events and the hash field `generated`, read in one step."""
        keys = self.client.keys.of_job(job.id)
        script = "return {redis.call('XRANGE', KEYS[1], '-', '+'), redis.call('HGET', KEYS[2], 'generated')}"
        entries, generated = await cast(Any, self.client.redis.eval(script, 2, keys.events, keys.job))
        return [codec.decode_event(fields[1]) for _, fields in entries], int(generated)


@asynccontextmanager
async def working(
    url: str, queue: str, *, checkpoints: Checkpoints = NEVER, streams: bool = True, lease_s: float = 1000.0
) -> AsyncIterator[Worker]:
    async with AsyncClient(url, queue) as client, FakeWorker(url, queue) as worker:
        engine, outputs = RecordingEngine(), OutputMailbox()
        outbox = Outbox(
            AttemptScripts(worker.redis, worker.keys),
            worker.name,
            engine,
            outputs,
            lease_s=lease_s,
            disconnect_s=1000.0,
            checkpoints=checkpoints,
            retry_delay=RetryDelay(0.01, 0.02),
            is_alive=lambda: True,
            on_finished=engine.record,
        )
        yield Worker(client, worker, outbox, outputs, engine, streams)


# jobs without per-token events


async def test_a_job_without_per_token_events_is_stored_at_checkpoints_of_tokens(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue, checkpoints=Checkpoints(4, 10**6), streams=False) as at:
        job, running = await at.begin()
        for number in range(11):
            await at.put(running, number)
            await at.outbox.flush()
            assert len(await at.stored(job)) == (number + 1) // 4 * 4
        assert await at.stored(job) == list(range(8))
        await at.end(running, 11)
        await at.outbox.flush()
        result = await job.result()
        assert (result.text, result.tokens) == ("abcdefghijk", tuple(range(11)))
        assert "".join([chunk.text async for chunk in job.stream()]) == result.text


async def test_a_job_without_per_token_events_is_stored_at_checkpoints_of_seconds(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE, streams=False) as at:
        job, running = await at.begin()
        await at.outbox.flush()
        assert [event.type for event in await at.events(job)] == ["started"], "a checkpoint needs tokens"
        await at.put(running, 0, 1, 2)
        await at.outbox.flush()
        assert await at.stored(job) == [0, 1, 2]


async def test_checkpoints_are_stored_and_not_published(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE, streams=False) as at, at.client.redis.pubsub() as pubsub:
        job, running = await at.begin()
        await pubsub.subscribe(at.client.keys.of_job(job.id).channel)
        await pubsub.get_message(timeout=5)
        await at.put(running, 0, 1)
        await at.outbox.flush()
        await at.put(running, 2)
        await at.end(running, 3)
        await at.outbox.flush()
        message = await pubsub.get_message(timeout=5)
        assert message is not None
        assert codec.decode_event(message["data"]).type == "finished"


async def test_the_offsets_of_tags_are_stored_with_their_text(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        job, first = await at.begin()

        async def put(running: Job, *tokens: tuple[str, int | None]) -> None:
            at.outputs.put([NewToken(running, 1, text, 0.0, tag_offset=offset) for text, offset in tokens])
            await asyncio.sleep(0)
            await at.outbox.flush()

        await put(first, ("<tag>", 0), ("é", None), ("", 6))
        await put(first, ("<tag><t", 11))  # a stop string withholds the rest
        chunks = job.stream()
        assert [(await anext(chunks)).tag_offsets for _ in range(2)] == [(0,), (6, 11)]
        assert (await read_output(at.client.redis, at.client.keys.of_job(job.id))).tag_offsets == (0, 6, 11)
        second = Job(first.lease, first.request, [1], first.sampler, first.detokenizer, generated_before=[1] * 4)
        prepared = PreparedJob(second, ["<tag>", "é", "", "<tag><t"], tag_offsets=[0, 6, 11])
        assert at.outbox.set_prepared(prepared)
        await put(second, ("", 16))  # its text is part of the stop string
        await at.end(second, 5)
        await at.outbox.flush()
        result = await job.result()
        assert (result.text, result.tag_offsets) == ("<tag>é<tag><t", (0, 6, 11))
        assert [chunk.tag_offsets async for chunk in chunks] == [()]


@pytest.mark.parametrize("reason", ["withdrawn", "close"])
@pytest.mark.parametrize("streams", [True, False])
async def test_generated_tokens_are_stored_before_a_job_is_requeued(
    redis_url: str, queue: str, streams: bool, reason: str
) -> None:
    async with working(redis_url, queue, streams=streams) as at:
        job, running = await at.begin()
        await at.put(running, 0, 1, 2)
        if reason == "withdrawn":
            at.outputs.put([JobWithdrawn(running)])
            await asyncio.sleep(0)
            await at.outbox.flush()
        else:
            await at.outbox.close()
        assert at.outbox.n_jobs == 0
        assert await at.stored(job) == [0, 1, 2]
        assert (await job.status()).state is JobState.QUEUED
        again = await at.claimer.claim_scripts.claim_job(
            JobEntry(job.id, running.lease.stream, running.lease.entry_id), "other", LEASE_MS
        )
        assert isinstance(again, Attempt)
        assert again.generated == 3


@pytest.mark.parametrize("streams", [True, False])
async def test_a_job_is_requeued_only_after_tokens_lost_in_a_failover_are_stored_again(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE, streams=streams) as at:
        job, running = await at.begin()
        keys = at.client.keys.of_job(job.id)
        await at.put(running, 0, 1, 2)
        await at.outbox.flush()
        await at.client.redis.delete(keys.events)  # a failover to a replica that has not received the last writes
        await at.client.redis.hset(keys.job, "generated", "0")
        await at.put(running, 3)
        await at.outbox.close()
        assert await at.stored(job) == [0, 1, 2, 3]
        assert (await job.status()).state is JobState.QUEUED


async def test_between_two_flushes_of_all_jobs_a_flush_contains_only_the_jobs_with_news(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    flush = AttemptScripts.flush

    async def recorded(
        scripts: AttemptScripts, worker: str, flushes: Sequence[JobFlush], *args: Any, **options: Any
    ) -> Any:
        flushed.extend(one.job_id for one in flushes)
        return await flush(scripts, worker, flushes, *args, **options)

    async with working(redis_url, queue) as at:
        silent, _ = await at.begin()
        job, running = await at.begin()
        monkeypatch.setattr(AttemptScripts, "flush", recorded)
        monkeypatch.setattr(outbox_module, "WHOLE_EVERY_S", 3600.0)
        task = asyncio.create_task(at.outbox.run())
        for number in range(5):
            await at.put(running, number)
            await until(at.stored, job, list(range(number + 1)))
        await cancel_tasks(task)
        assert flushed.count(job.id) >= 5
        assert flushed.count(silent.id) == 0, "the last flush of all jobs was less than WHOLE_EVERY_S ago"
        await at.outbox.flush()
        assert flushed.count(silent.id) == 1


# damaged keys of a job


@pytest.mark.parametrize("streams", [True, False])
async def test_overwritten_events_affect_one_job_alone_and_are_written_again(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE, streams=streams) as at:
        broken, first = await at.begin()
        sound, second = await at.begin()
        await at.put(first, 0, 1)
        await at.outbox.flush()
        await at.client.redis.set(at.client.keys.of_job(broken.id).events, "not a stream")
        await at.put(first, 2)
        await at.put(second, 7, 8)
        await at.outbox.flush()
        assert [event.tokens for event in await at.events(sound) if isinstance(event, Tokens)] == [(7, 8)]
        await at.outbox.flush()
        assert await at.stored(broken) == [0, 1, 2]


@pytest.mark.parametrize("streams", [True, False])
async def test_events_overwritten_before_the_end_of_a_job_are_written_again_with_the_end(
    redis_url: str, queue: str, streams: bool
) -> None:
    async with working(redis_url, queue, streams=streams) as at:
        job, running = await at.begin()
        await at.put(running, 0, 1)
        await at.outbox.flush()
        await at.client.redis.set(at.client.keys.of_job(job.id).events, "not a stream")
        await at.put(running, 2)
        await at.end(running, 3)
        for _ in range(2):
            await at.outbox.flush()
        assert at.outbox.n_jobs == 0
        chunks = [chunk async for chunk in at.client.job(job.id).stream()]
        assert "".join(chunk.text for chunk in chunks) == (await job.result()).text == "abc"
        assert [(ended.job_id, ended.stats) for ended in at.engine.finished] == [(job.id, JobStats(generated_tokens=3))]


@pytest.mark.parametrize("count", ["-1", "1.5", "nan", "1e400", "99999999999999999999", "1000000"])
@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_damaged_number_of_stored_tokens_affects_one_job_alone(
    redis_url: str, queue: str, count: str, has_ended: bool
) -> None:
    async with working(redis_url, queue) as at:
        broken, first = await at.begin()
        sound, second = await at.begin()
        await at.put(first, 0, 1)
        await at.outbox.flush()
        await at.client.redis.hset(at.client.keys.of_job(broken.id).job, "generated", count)
        if not has_ended:
            await at.outbox.flush()
        await at.put(first, 2)
        await at.put(second, 7, 8)
        stats = JobStats(generated_tokens=3)
        at.outputs.put([JobEnded(first, stats, reason=FinishReason.LENGTH, text="!")])  # withheld until the end
        await at.end(second, 2)
        async with asyncio.timeout(10):
            await at.outbox.flush()
        assert at.outbox.n_jobs == 0
        assert [(await job.result()).text for job in (broken, sound)] == ["abc!", "hi"]


async def test_the_end_of_a_job_does_not_repeat_tokens_of_a_flush_whose_reply_was_lost(
    redis_url: str, queue: str
) -> None:
    async with working(redis_url, queue) as at:
        job, running = await at.begin()
        await at.client.redis.hset(at.client.keys.of_job(job.id).job, "events_ttl_ms", 60_000)
        await at.put(running, 0, 1, 2)
        await at.outbox.flush()
        next(iter(at.outbox._jobs)).stored.n_tokens = 0  # as if the connection had been cut before the reply
        await at.put(running, 3)
        await at.end(running, 4)
        await at.outbox.flush()
        assert at.outbox.n_jobs == 0
        assert await at.stored(job) == [0, 1, 2, 3]
        assert (await job.result()).text == "abcd"


async def test_a_rejected_job_ends_although_its_events_were_overwritten(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        job, running = await at.begin()
        await at.client.redis.delete(at.client.keys.of_job(job.id).events)
        await at.client.redis.hset(at.client.keys.of_job(job.id).events, "not", "a stream")
        at.outbox.reject(running.lease, JobRejected(ErrorCode.INVALID_GRAMMAR, "no root"))
        for _ in range(2):
            await at.outbox.flush()
        with pytest.raises(JobFailed, match="no root"):
            await job.result()


async def test_a_second_claim_with_the_same_number_replaces_the_first_attempt(redis_url: str, queue: str) -> None:
    """A failover that has lost the first claim gives the second one the same number."""
    async with working(redis_url, queue) as at:
        job, old = await at.begin()
        lease = dataclasses.replace(old.lease)
        at.outbox.register(lease, at.attempts[job.id], JobTimes())
        assert at.engine.released == [old.lease]
        new = Job(lease, old.request, [1], sampler=cast(Any, None), detokenizer=cast(Any, None))
        assert not at.outbox.set_prepared(PreparedJob(old, []))
        assert at.outbox.set_prepared(PreparedJob(new, []))
        await at.put(old, 9, 9)
        at.outputs.put([JobWithdrawn(old)])
        await at.put(new, 7)
        await at.outbox.flush()
        assert await at.stored(job) == [7]
        assert at.outbox.n_running == 1, "the withdrawal of the first attempt does not requeue the second one"


@pytest.mark.parametrize("has_ended", [False, True])
async def test_only_the_job_whose_hash_was_overwritten_is_lost(redis_url: str, queue: str, has_ended: bool) -> None:
    async with working(redis_url, queue) as at:
        broken, first = await at.begin()
        sound, second = await at.begin()
        await at.client.redis.set(at.client.keys.of_job(broken.id).job, "not a hash")
        await at.put(first, 0)
        await at.put(second, 7, 8)
        if has_ended:
            await at.end(first, 1)
        await at.outbox.flush()
        assert await at.stored(sound) == [7, 8]
        assert at.outbox.n_jobs == 1
        assert at.engine.released == [first.lease]


# a full Redis


@asynccontextmanager
async def full(redis: Any) -> AsyncIterator[None]:
    """Make Redis refuse writes that need memory, until the end of the block."""
    used = (await redis.info("memory"))["used_memory"]
    await redis.set("ballast", b"x" * 200_000)
    await redis.config_set("maxmemory", used + 100_000)
    try:
        yield
    finally:
        await redis.config_set("maxmemory", 0)


@pytest.fixture
def own_url() -> Iterator[str]:
    """A Redis server for one test alone, because `maxmemory` applies to the whole server."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.mark.starts_processes
@pytest.mark.parametrize("streams", [True, False])
async def test_jobs_keep_their_leases_while_redis_is_full_and_continue_afterwards(
    own_url: str, queue: str, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llamaq.worker.broker.outbox")
    async with working(own_url, queue, checkpoints=AT_ONCE, streams=streams, lease_s=0.1) as at:
        job, running = await at.begin()
        ending, last = await at.begin()
        requeued, withdrawn = await at.begin()
        task = asyncio.create_task(at.outbox.run())
        await at.put(running, 0, 1)
        await until(at.stored, job, [0, 1])
        redis = at.client.redis
        async with full(redis):
            await at.put(running, 2, 3)
            await at.put(last, 5)
            await at.end(last, 1)
            await at.put(withdrawn, 9)
            at.outputs.put([JobWithdrawn(withdrawn)])
            idle = [await idle_ms(at, running)]
            while "redis_full" not in caplog.text or n_renewals(idle) < 3:
                await asyncio.sleep(0.005)
                idle.append(await idle_ms(at, running))
            assert await at.stored(job) == [0, 1]
            assert at.outbox.n_jobs == 2
            assert (await ending.result(timeout=5)).tokens == (5,), "the end of a job passes"
        await until(at.stored, job, [0, 1, 2, 3])
        await until(at.stored, requeued, [9])
        while "redis_recovered" not in caplog.text:  # noqa: ASYNC110 - logged only after the flush that stored these results
            await asyncio.sleep(0.005)
        await cancel_tasks(task)
        logged = [record.getMessage().split()[0] for record in caplog.records if "redis" in record.getMessage()]
        assert logged == ["outbox.redis_full", "outbox.redis_recovered"], "many failed flushes cause one warning"
        assert "tokens_resent" not in caplog.text, "Redis stored exactly what the outbox expected"
        assert at.engine.released == []


async def until(read: Callable[[AsyncJob], Awaitable[list[int]]], job: AsyncJob, wanted: list[int]) -> None:
    """Wait until `read` returns `wanted`."""
    async with asyncio.timeout(10):
        while await read(job) != wanted:  # noqa: ASYNC110  # Redis changes without an event
            await asyncio.sleep(0.01)


def n_renewals(idle: list[int]) -> int:
    """Return the number of lease renewals: how often the idle time of the entry became shorter."""
    return sum(after < before for before, after in pairwise(idle))


async def idle_ms(at: Worker, job: Job) -> int:
    lease = job.lease
    pending: Any = await at.client.redis.xpending_range(lease.stream, GROUP, lease.entry_id, lease.entry_id, 1)
    return int(pending[0]["time_since_delivered"])


@pytest.mark.starts_processes
async def test_a_flush_that_a_full_redis_refuses_stores_nothing_and_still_reports_cancellations(
    own_url: str, queue: str
) -> None:
    async with working(own_url, queue) as at:
        job, running = await at.begin()
        await job.cancel()
        await at.put(running, 0)
        async with full(at.client.redis):
            with pytest.raises(ResponseError) as caught:
                await at.outbox.flush()
            assert is_full(caught.value)
            assert at.engine.cancelled == [job.id]
            assert [type(event) for event in await at.events(job)] == [Started]
        await at.outbox.flush()
        assert await at.stored(job) == [0]


@pytest.mark.starts_processes
async def test_jobs_are_requeued_while_redis_is_full(own_url: str, queue: str) -> None:
    async with working(own_url, queue) as at:
        (_, withdrawn), (stopped, running), (dead, _) = [await at.begin() for _ in range(3)]
        await at.put(withdrawn, 1)
        await at.put(running, 2)
        await at.outbox.flush()
        await at.put(running, 3)
        at.outbox._jobs.remove(
            next(one for one in at.outbox._jobs if one.lease.job_id == dead.id)
        )  # its worker has died
        async with full(at.client.redis):
            at.outputs.put([JobWithdrawn(withdrawn)])
            await asyncio.sleep(0)
            with pytest.raises(ResponseError) as caught:
                await at.outbox.flush()
            assert is_full(caught.value)
            assert at.outbox.n_jobs == 1, "all tokens of the withdrawn job are stored"
            await at.outbox.close()
            upkeep = UpkeepScripts(at.claimer.redis, at.client.keys, queue)
            assert await upkeep.release_worker(0, at.claimer.name) == 1
            stream = at.client.keys.of_job(stopped.id).interactive
            assert len(await at.claimer.claim_scripts.reclaim(stream, 9, LEASE_MS, trusted_until_ms=0)) == 3
        assert await at.stored(stopped) == [2], "the next worker generates the token that Redis has refused"


# the report of ended jobs


@pytest.mark.parametrize("how", ["cancel", "queue_timeout_s", "close"])
async def test_the_end_of_a_job_that_waits_in_the_worker_is_reported_once(redis_url: str, queue: str, how: str) -> None:
    async with working(redis_url, queue) as at:
        limit_s = 1000 if how == "queue_timeout_s" else None
        job, lease, request = await at.claim(metadata={"user": "u1"}, queue_timeout_s=limit_s)
        unused = cast(Any, None)
        assert at.outbox.set_prepared(PreparedJob(Job(lease, request, [1], unused, unused), []))
        await at.outbox.flush()
        assert at.engine.finished == []
        if limit_s is None:
            await job.cancel()
        else:
            await at.client.redis.hset(at.client.keys.of_job(job.id).job, "queue_deadline_ms", "1")
            assert await JobScripts(at.claimer.redis, at.claimer.keys).expire(job.id) == "ended"
        for _ in range(2):
            await (at.outbox.close() if how == "close" else at.outbox.flush())
        (ended,) = at.engine.finished
        reason = FinishReason.DEADLINE if limit_s else FinishReason.CANCELLED
        assert (ended.job_id, ended.finish_reason, ended.error_code) == (job.id, reason, None)
        assert ended.metadata == {"user": "u1"}
        assert (ended.stats.worker, ended.stats.seed) == (at.claimer.name, request.seed)
        assert at.engine.released == [lease]


async def test_the_report_of_a_job_that_could_not_be_prepared_has_its_metadata(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        _, lease, request = await at.claim(metadata={"user": "u1"})
        at.outbox.reject(lease, JobRejected(ErrorCode.INVALID_GRAMMAR, "a wrong grammar"))
        await at.outbox.flush()
        (ended,) = at.engine.finished
        assert (ended.finish_reason, ended.error_code) == (None, "invalid_grammar")
        assert ended.metadata == {"user": "u1"}
        assert ended.stats.queue_ms > 0
        assert ended.stats.seed == request.seed


async def test_a_job_that_another_worker_has_taken_is_not_reported(redis_url: str, queue: str) -> None:
    async with working(redis_url, queue) as at:
        job, lease, _ = await at.claim()
        claim = JobEntry(job.id, lease.stream, lease.entry_id)
        assert isinstance(await at.claimer.claim_scripts.claim_job(claim, "other", LEASE_MS), Attempt)
        await job.cancel()
        await at.outbox.flush()
        assert at.outbox.n_jobs == 0
        assert at.engine.finished == []


async def test_a_job_that_is_requeued_while_it_is_prepared_does_not_reach_the_engine(
    redis_url: str, queue: str
) -> None:
    async with working(redis_url, queue, checkpoints=AT_ONCE) as at:
        _, suspect, _ = await at.claim()
        job, lease, request = await at.claim()
        at.outbox.requeue_all(except_for=suspect)
        unused = cast(Any, None)
        assert not at.outbox.set_prepared(PreparedJob(Job(lease, request, [1], unused, unused), []))
        await at.outbox.flush()
        assert not at.outbox.is_registered(lease)
        assert (await job.status()).state is JobState.QUEUED
