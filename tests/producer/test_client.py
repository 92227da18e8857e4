"""The asyncio client on a real Redis, with a fake worker."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.worker_cards import KilledWorker
from tests.support.worker_scripts import worker_scripts

from llamaq.common.protocol.chat import Message
from llamaq.common.protocol.keys import JobId
from llamaq.producer import (
    AsyncClient,
    FinishReason,
    InvalidRequest,
    InvalidSettings,
    JobFailed,
    JobNotFound,
    JobState,
    NoWorker,
    Priority,
    ProtocolError,
    QueueDepth,
    QueueFull,
)
from llamaq.producer.streaming import poll_schedule
from llamaq.producer.testing import FakeWorker


async def test_generate_submits_without_events_and_returns_the_result(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        waiting = asyncio.create_task(client.generate("hello", max_tokens=7, seed=5, metadata={"user": "u1"}))
        attempt = await worker.start_next()
        assert attempt.request.prompt == "hello"
        assert (attempt.request.max_tokens, attempt.request.stream) == (7, False)
        await attempt.answer(["a", "b", "c"])
        result = await waiting
        assert (result.text, result.tokens, result.finish_reason) == ("abc", (0, 1, 2), FinishReason.STOP)
        assert (result.seed, result.metadata, result.job_id) == (5, {"user": "u1"}, attempt.claim.job_id)
        assert result.stats.generated_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_the_joined_chunks_of_a_stream_equal_the_result_with_and_without_events(
    redis_url: str, queue: str, stream: bool
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        serving = asyncio.create_task(worker.serve(lambda _: ["é", "", "ßø", "d"]))
        chunks = [chunk async for chunk in await client.stream("x", stream=stream)]
        assert "".join(chunk.text for chunk in chunks) == "éßød"
        assert [token for chunk in chunks for token in chunk.tokens] == [0, 1, 2, 3]
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.offset for chunk in chunks] == [
            sum(len(c.tokens) for c in chunks[:n]) for n in range(len(chunks))
        ]
        serving.cancel()


async def test_every_form_of_prompt_reaches_the_worker(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        chat = [{"role": "user", "content": "hi"}]
        await client.submit("text")
        await client.submit(tokens=[1, 2, 3])
        await client.submit(messages=chat)
        await client.submit(messages=[Message(role="user", content="hi")])
        seen = [(await worker.start_next()).request for _ in range(4)]
        assert seen[0].prompt == "text"
        assert seen[1].tokens == (1, 2, 3)
        assert seen[2].messages == seen[3].messages == (Message(role="user", content="hi"),)


async def test_the_token_and_chat_variants_generate_and_stream(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        serving = asyncio.create_task(worker.serve(lambda request: [str(request.tokens or request.messages)]))
        by_tokens = (await client.generate_tokens([4, 5])).text
        assert by_tokens == "(4, 5)"
        assert [chunk.text async for chunk in await client.stream_tokens([4, 5])] == [by_tokens]
        by_chat = (await client.chat([{"role": "user", "content": "hi"}])).text
        assert "content='hi'" in by_chat
        assert [chunk.text async for chunk in await client.stream_chat([{"role": "user", "content": "hi"}])] == [
            by_chat
        ]
        serving.cancel()


async def test_a_missing_seed_is_drawn_and_returned(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        serving = asyncio.create_task(worker.serve(lambda _: ["x"]))
        first, second = await asyncio.gather(client.generate("x"), client.generate("x", seed=None))
        assert first.seed != second.seed
        serving.cancel()


async def test_an_invalid_parameter_is_refused_without_a_redis_command(queue: str) -> None:
    async with AsyncClient("redis://localhost:1", queue) as client:  # no server listens on this port
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await client.generate("x", max_tokens=-2)
        with pytest.raises(InvalidRequest, match="top_p"):
            await client.stream("x", top_p=2)
        with pytest.raises(InvalidRequest, match="exactly one"):
            await client.submit("x", tokens=[1])
        with pytest.raises(InvalidRequest, match="exactly one"):
            await client.submit()
        with pytest.raises(InvalidRequest, match="role"):
            await client.chat([{"role": "USER!", "content": "x"}])
        with pytest.raises(InvalidRequest, match="not a job id"):
            client.job("default.0.x")
        with pytest.raises(InvalidRequest, match="Unicode"):
            await client.submit("\ud800")


async def test_a_request_larger_than_the_limit_is_refused(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, max_request_bytes=2048) as client:
        with pytest.raises(InvalidRequest, match="max_request_bytes=2048"):
            await client.submit("x" * 2048)
        await client.submit("x" * 1500)


def test_bad_settings_name_the_flag() -> None:
    with pytest.raises(InvalidSettings, match="--queue"):
        AsyncClient(queue="a b")
    with pytest.raises(InvalidSettings, match="--redis-url"):
        AsyncClient("http://localhost")


async def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", "from-environment")
    async with AsyncClient() as client, AsyncClient(queue="given") as other:
        assert (client.queue, other.queue) == ("from-environment", "given")
        assert await client.queue_depth() == QueueDepth(waiting=0, running=0)


async def test_a_failed_job_raises_from_result_stream_and_generate(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        waiting = asyncio.create_task(client.generate("hello"))
        attempt = await worker.start_next()
        await attempt.fail("prompt_too_long", "9 tokens are too many")
        job = client.job(attempt.claim.job_id)
        for failing in (waiting, job.result(), anext(job.stream())):
            with pytest.raises(JobFailed, match="9 tokens are too many") as caught:
                await failing
            assert (caught.value.code, caught.value.job_id) == ("prompt_too_long", job.id)


async def test_a_job_that_fails_after_some_chunks_yields_them_first(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        attempt = await worker.start_next()
        await attempt.emit([1], "a")
        await attempt.fail()
        chunks = job.stream()
        assert (await anext(chunks)).text == "a"
        with pytest.raises(JobFailed, match="broken on purpose"):
            await anext(chunks)


async def test_every_method_of_an_unknown_job_raises_job_not_found(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = client.job(str(JobId.new(queue)))
        for call in (job.status(), job.result(), job.cancel(), anext(job.stream())):
            with pytest.raises(JobNotFound, match="result_ttl_s"):
                await call


async def test_readers_of_a_deleted_job_raise_job_not_found(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_schedule, "WAITING_SILENCE_S", 0.2)
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("hello")
        waiting = [asyncio.ensure_future(job.result()), asyncio.ensure_future(anext(job.stream()))]
        await asyncio.sleep(0.05)  # both calls must notice the deletion, whether or not they have subscribed by then
        await client.redis.delete(client.keys.of_job(job.id).job)
        for one in waiting:
            with pytest.raises(JobNotFound):
                await one


async def test_a_job_can_be_followed_from_another_client_by_its_id(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        attempt = await worker.start_next()
        await attempt.answer(["a", "b"])
        async with AsyncClient(redis_url, "another-queue") as other:
            again = other.job(job.id)
            assert (await again.result()).text == "ab"
            for _ in range(2):
                assert "".join([chunk.text async for chunk in again.stream()]) == "ab"


async def test_cancelling_a_waiting_job_gives_an_empty_result(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("hello", seed=3, metadata={"n": 1})
        assert await job.cancel() is True
        assert await client.cancel(job.id) is False
        result = await job.result()
        assert (result.text, result.tokens, result.finish_reason) == ("", (), FinishReason.CANCELLED)
        assert (result.seed, result.metadata) == (3, {"n": 1})
        assert [chunk async for chunk in job.stream()] == []


async def test_a_job_cancelled_between_two_attempts_keeps_its_output(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        attempt = await worker.start_next()
        await attempt.emit([1, 2], "ab")
        await attempt.emit([3], "c")
        await worker_scripts(worker).requeue(attempt.claim, attempt.number)
        await job.cancel()
        result = await job.result()
        assert (result.text, result.tokens, result.finish_reason) == ("abc", (1, 2, 3), FinishReason.CANCELLED)
        assert "".join([chunk.text async for chunk in job.stream()]) == "abc"


async def test_status_shows_each_state_of_a_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("hello")
        queued = await job.status()
        assert (queued.state, queued.attempt, queued.started_ms) == (JobState.QUEUED, 0, None)
        assert abs((queued.submitted_ms or 0) - time.time() * 1000) < 60_000
        attempt = await worker.start_next()
        await attempt.emit([1, 2], "ab")
        running = await job.status()
        assert (running.state, running.generated_tokens, running.worker) == (JobState.RUNNING, 2, "fake")
        await attempt.finish()
        ended = await job.status()
        assert (ended.state, ended.finish_reason) == (JobState.FINISHED, FinishReason.STOP)
        assert (ended.submitted_ms or 0) <= (ended.started_ms or 0) <= (ended.finished_ms or 0)


async def test_queue_depth_counts_all_partitions_and_priorities(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, partitions=3) as client:
        assert await client.queue_depth() == QueueDepth(waiting=0, running=0)
        for number in range(12):
            await client.submit("x", priority=Priority.BULK if number % 2 else "interactive")
        assert await client.queue_depth() == QueueDepth(waiting=12, running=0)
        async with FakeWorker(redis_url, queue) as worker:
            claimed = 0
            while (claim := await worker.claim()) is not None:
                await worker.begin(claim)
                claimed += 1
        assert await client.queue_depth() == QueueDepth(waiting=12 - claimed, running=claimed)


async def test_a_full_queue_refuses_with_its_depth(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.redis.hset(client.keys.config(queue, 0), "max_queue", "2")
        await client.submit("x")
        await client.submit("x")
        for refused in (client.submit("x"), client.generate("x"), client.stream("x")):
            with pytest.raises(QueueFull, match="2 jobs wait") as caught:
                await refused
            assert (caught.value.depth, caught.value.max_queue) == (2, 2)


async def test_workers_lists_live_workers_without_expired_ones(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        assert await client.workers() == ()
        async with KilledWorker(redis_url, queue, name=f"{queue}-b") as one:
            await one.announce(now_ms=5)
        async with KilledWorker(redis_url, queue, name=f"{queue}-a") as two:
            await two.announce(now_ms=6)
        await client.redis.zadd(client.keys.workers(queue), {"dead": 1})
        await client.redis.hset(client.keys.worker(f"{queue}-strange"), "worker", b"\xc1")
        await client.redis.zadd(client.keys.workers(queue), {f"{queue}-strange": 1})
        listed = await client.workers()
        assert [worker.card.worker for worker in listed] == [f"{queue}-a", f"{queue}-b"]
        assert listed[0].heartbeat_ms == 6
        assert await client.redis.zscore(client.keys.workers(queue), "dead") == 1, "workers need its last heartbeat"


async def test_stats_shows_depth_workers_and_the_last_jobs_newest_first(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        for length in (1, 2, 3):
            await client.submit("x")
            await (await worker.start_next()).answer(["x"] * length)
        await client.submit("waits")
        stats = await client.stats()
        assert (stats.queue, stats.depth) == (queue, QueueDepth(waiting=1, running=0))
        assert [recent.stats.generated_tokens for recent in stats.recent] == [3, 2, 1]
        assert [one.card.worker for one in stats.workers] == ["fake"]


async def test_tokenizer_needs_a_worker(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        with pytest.raises(NoWorker):
            await client.tokenizer()


async def test_clients_of_other_queues_and_prefixes_share_no_jobs(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, AsyncClient(redis_url, queue, key_prefix="other") as other:
        job = await client.submit("x")
        assert (await other.queue_depth()).waiting == 0
        with pytest.raises(JobNotFound):
            await other.job(job.id).status()


@pytest.mark.slow
async def test_a_call_to_an_unreachable_redis_fails_at_once(queue: str, free_port: int) -> None:
    async with AsyncClient(f"redis://127.0.0.1:{free_port}", queue) as client:
        some = str(JobId.new(queue))
        calls: list[Any] = [client.submit("x"), client.generate("x"), client.queue_depth(), client.job(some).result()]
        outcomes = await asyncio.gather(*calls, anext(client.job(some).stream()), return_exceptions=True)
        assert [isinstance(outcome, RedisConnectionError) for outcome in outcomes] == [True] * 5, outcomes


async def test_hundreds_of_concurrent_calls_share_a_few_connections(redis_url: str, queue: str) -> None:
    async def connections() -> int:
        clients: Any = await client.redis.client_list()
        return len([one for one in clients if one["name"] == "llamaq-client"])

    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        before = await connections()  # one connection of this client, and those of other tests
        serving = asyncio.create_task(worker.serve(lambda request: [request.prompt or ""]))
        results = await asyncio.gather(*(client.generate(f"job {number}") for number in range(200)))
        assert [result.text for result in results] == [f"job {number}" for number in range(200)]
        assert await connections() - before <= 40
        serving.cancel()


async def test_closing_sends_the_cancellations_in_flight(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        waiting = asyncio.create_task(client.generate("hello"))
        while (await client.queue_depth()).waiting == 0:  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.01)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    async with AsyncClient(redis_url, queue) as client:
        assert (await client.queue_depth()).waiting == 0


async def test_repr_shows_live_state(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        assert repr(client) == f"<AsyncClient queue='{queue}' <Subscriber channels=0 confirmed=0>>"
        job = await client.submit("x")
        assert repr(job) == f"<AsyncJob {job.id}>"
        async with aclosing(job.stream()) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            await (await worker.start_next()).emit([1], "a")
            await first
            assert repr(client.subscriber) == "<Subscriber channels=1 confirmed=1>"
        assert repr(client.subscriber).startswith("<Subscriber channels=0")


async def test_a_result_that_another_version_wrote_is_a_protocol_error_not_a_crash(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x")
        await (await worker.start_next()).answer(["a"])
        await client.redis.hset(client.keys.of_job(job.id).job, "output", b"\xc1")
        with pytest.raises(ProtocolError):
            await job.result()


@pytest.mark.parametrize(
    ("field", "value"),
    [("status", "junk"), ("attempt", "1e999"), ("worker", b"\xff"), ("submitted_ms", "x"), ("finish_reason", "junk")],
)
async def test_the_status_of_a_job_with_a_damaged_hash_is_an_error_that_says_so(
    redis_url: str, queue: str, field: str, value: Any
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("hello")
        await client.redis.hset(client.keys.of_job(job.id).job, field, value)
        with pytest.raises(ProtocolError, match="hash"):
            await job.status()
