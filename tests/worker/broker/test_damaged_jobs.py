"""A job whose data were damaged by another client of Redis ends: it fails, and is a dead letter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
from tests.support.event_loop_gaps import check_gaps
from tests.support.job_claims import claims_of, worker_queue
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.keys import JobKeys
from llamaq.common.protocol.queue_and_worker_state import RecentJob
from llamaq.common.protocol.script_types import Claimant
from llamaq.producer import AsyncClient, AsyncJob, ErrorCode, JobFailed, JobState
from llamaq.producer.testing import LEASE_MS, FakeAttempt, FakeWorker
from llamaq.worker.broker.published_output import PAGE_EVENTS, read_published
from llamaq.worker.engine_loop.telemetry import EndedJob

Damage = Callable[[Any, JobKeys], Awaitable[object]]
HEIR = Claimant("heir", LEASE_MS)


async def delete_events(redis: Any, keys: JobKeys) -> None:
    await redis.delete(keys.events)


async def overwrite_events(redis: Any, keys: JobKeys) -> None:
    await redis.set(keys.events, "not a stream")


async def delete_one_event(redis: Any, keys: JobKeys) -> None:
    entries = await redis.xrange(keys.events)
    await redis.xdel(keys.events, entries[2][0])


async def overwrite_hash(redis: Any, keys: JobKeys) -> None:
    await redis.set(keys.job, "not a hash")


async def delete_fields(redis: Any, keys: JobKeys) -> None:
    await redis.hdel(keys.job, "submitted_ms", "ttl_ms")


async def overwrite_priority(redis: Any, keys: JobKeys) -> None:
    await redis.hset(keys.job, "priority", "urgent")


@asynccontextmanager
async def interrupted_job(url: str, queue: str) -> AsyncIterator[tuple[AsyncClient, FakeWorker, AsyncJob, FakeAttempt]]:
    """A job that has stored three tokens and was requeued by its worker."""
    async with AsyncClient(url, queue) as client, FakeWorker(url, queue) as worker:
        job = await client.submit("hello", metadata={"user": 1})
        attempt = await worker.start_next()
        for number, letter in enumerate("abc"):
            await attempt.emit([number], letter)
        assert await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        yield client, worker, job, attempt


@pytest.mark.parametrize(
    "damage",
    [delete_events, overwrite_events, delete_one_event, overwrite_hash, delete_fields, overwrite_priority],
    ids=lambda it: it.__name__,
)
async def test_a_job_with_damaged_data_fails_once_and_is_a_dead_letter(
    redis_url: str, queue: str, damage: Damage
) -> None:
    async with interrupted_job(redis_url, queue) as (client, worker, job, attempt):
        keys = client.keys.of_job(job.id)
        ended: list[EndedJob] = []
        await damage(client.redis, keys)
        async with worker.redis.pubsub() as pubsub:
            await pubsub.subscribe(keys.channel)
            await pubsub.get_message(timeout=60)
            for _ in range(2):
                assert await claims_of(worker, HEIR, ended=ended).claim_job(attempt.claim) is None
            await worker.redis.publish(keys.channel, codec.encode_tokens(0, [], 0, ""))
            messages = [await pubsub.get_message(timeout=60) for _ in range(2)]
        published = [codec.decode_event(message["data"]).type for message in messages if message]
        assert published == ["failed", "tokens"], "one terminal event before the marker"

        assert [(one.job_id, one.error_code, one.stats.worker) for one in ended] == [(job.id, "damaged", "heir")]
        assert ended[0].metadata == ({} if damage is overwrite_hash else {"user": 1})
        assert (await job.status()).state is JobState.FAILED
        assert await job.cancel() is False
        for read in (client.job(job.id).result, job.result):
            with pytest.raises(JobFailed, match="damaged") as caught:
                await read(timeout=60)
            assert caught.value.code == ErrorCode.DAMAGED
        with pytest.raises(JobFailed, match="damaged"):
            [chunk async for chunk in client.job(job.id).stream(timeout=60)]
        (letter,) = await client.dead_letters()
        assert letter.job_id == job.id
        details = await client.dead_letter(letter.id)
        assert details.reason == letter.reason
        if damage is delete_one_event:
            assert (details.text, details.tokens) == ("a", (0,)), "the output before the missing event"
        assert await worker.redis.xlen(attempt.claim.stream) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"generated": "9" * 400},
        {"generated": "-5"},
        {"generated": 4, "returned": msgpack.packb({"seed": "9" * 400, "metadata": {}})},
        {"generated": 4, "returned": msgpack.packb({"seed": 1e300, "metadata": {}})},
    ],
    ids=["large count", "negative count", "large seed", "infinite seed"],
)
async def test_the_stats_of_a_damaged_job_can_be_stored(redis_url: str, queue: str, fields: Any) -> None:
    """A number that msgpack cannot encode ended the worker."""
    async with interrupted_job(redis_url, queue) as (client, worker, job, attempt):
        ended: list[EndedJob] = []
        await client.redis.hset(client.keys.of_job(job.id).job, mapping=fields)
        assert await claims_of(worker, HEIR, ended=ended).claim_job(attempt.claim) is None
        (end,) = ended
        recent = RecentJob(job_id=job.id, error_code=end.error_code, stats=end.stats)
        await worker_scripts(worker).add_stats(queue, [recent])
        (stored,) = (await client.stats()).recent
        assert (stored.job_id, stored.error_code) == (job.id, "damaged")
        assert stored.stats.generated_tokens in (0, 4)


async def test_a_job_whose_events_were_damaged_can_be_retried(redis_url: str, queue: str) -> None:
    async with interrupted_job(redis_url, queue) as (client, worker, job, attempt):
        await delete_events(client.redis, client.keys.of_job(job.id))
        assert await claims_of(worker, HEIR).claim_job(attempt.claim) is None
        retried = await client.retry_dead_letter(job.id)
        await (await worker.start_next()).answer(["fine"])
        assert (await client.job(retried.id).result()).text == "fine"


async def test_a_worker_that_lost_the_job_cannot_fail_it(redis_url: str, queue: str) -> None:
    async with interrupted_job(redis_url, queue) as (client, worker, job, attempt):
        claimed = await claims_of(worker, HEIR).claim_job(attempt.claim)
        assert claimed is not None
        assert claimed.published.tokens == (0, 1, 2)
        error = Failed(code=ErrorCode.DAMAGED, message="late")
        for name, number in (("heir", 1), ("other", claimed.attempt.number)):
            assert not await worker_scripts(worker, name).bury(attempt.claim, number, error)
        assert (await job.status()).finished_ms is None
        assert await client.dead_letters() == ()


def of(token: int) -> TokenLogprobs:
    """Return made-up probabilities of a token."""
    return TokenLogprobs(-float(token), ((token, -1.0),))


async def test_stored_tokens_are_read_back_over_several_pages(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        attempt = await worker.start_next()
        n_tokens = 2 * PAGE_EVENTS
        async with client.redis.pipeline() as pipe:
            for number in range(n_tokens):
                pipe.xadd(
                    client.keys.of_job(job.id).events,
                    {"e": codec.encode_tokens(number, [number], number, "a", [of(number)], [1 / (1 + number)])},
                )
            pipe.hset(client.keys.of_job(job.id).job, "generated", n_tokens)
            await pipe.execute()
        claimed = await claims_of(worker, HEIR).claim_job(attempt.claim)
        assert claimed is not None
        assert claimed.published.tokens == tuple(range(n_tokens))
        assert claimed.published.logprobs == tuple(map(of, range(n_tokens)))
        assert claimed.published.draws == tuple(1 / (1 + number) for number in range(n_tokens))


async def test_other_streams_continue_while_a_large_event_is_read_back(redis_url: str, queue: str) -> None:
    """The decoding of one event of 20 MB stopped all streams of the worker for seconds."""
    n_tokens = 10_000
    event = codec.encode_tokens(0, [1] * n_tokens, 0, "", [TokenLogprobs(-1.0, ((1, -1.0),) * 20)] * n_tokens)
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("hello")
        await client.redis.xadd(client.keys.of_job(job.id).events, {"e": event})
        assert len((await read_published(worker_queue(client), job.id)).logprobs) == n_tokens
        await check_gaps(lambda: codec.decode_streamed(event), lambda: read_published(worker_queue(client), job.id))
