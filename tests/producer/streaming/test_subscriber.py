"""Streams lose, repeat and reorder no token when messages are lost or damaged, and readers share one connection."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest
from redis.exceptions import ResponseError
from tests.support.loop_clock import advance_loop_clock
from tests.support.numbered_streams import check_output, emit, read_all, submit_and_start, until_confirmed

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.producer import AsyncClient, Chunk, FinishReason, ResultTimeout
from llamaq.producer.streaming import poll_schedule, pubsub_connection, subscriber
from llamaq.producer.streaming.event_reader import INBOX_EVENTS, PAGE_EVENTS, EventReader
from llamaq.producer.streaming.pubsub_connection import MESSAGES_PER_YIELD, PubSubConnection
from llamaq.producer.testing import FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis

NEVER = "socket_timeout=600"
"""A parameter of a URL: no command that is in flight times out when the clock of the event loop moves."""


async def test_readers_that_join_early_late_and_after_the_end_read_the_same(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job = await client.submit("x")
        readers = [asyncio.create_task(read_all(job))]
        attempt = await worker.start_next()
        for _ in range(5):
            await emit(attempt, 7)
            readers.append(asyncio.create_task(read_all(job)))
        await attempt.finish(tokens=[35], text="35 ")
        readers.append(asyncio.create_task(read_all(job)))
        for reader in readers:
            check_output(await reader, 36)


async def test_twenty_readers_of_one_job_use_one_subscription(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        readers = [asyncio.create_task(read_all(job)) for _ in range(20)]
        await until_confirmed(client)
        assert (await attempt.emit([], "")).listeners == 1
        await emit(attempt, 50)
        await attempt.finish()
        for reader in readers:
            check_output(await reader, 50)


async def test_the_last_reader_of_a_job_unsubscribes(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        await emit(attempt, 1)
        async with aclosing(job.stream()) as one, aclosing(job.stream()) as two:
            await anext(one)
            await anext(two)
            await one.aclose()
            assert (await attempt.emit([], "")).listeners == 1
        while (await attempt.emit([], "")).listeners:  # noqa: ASYNC110  # a worker polls too
            await asyncio.sleep(0.005)


def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients poll silent jobs 20 times a second."""
    monkeypatch.setattr(subscriber, "CHECK_S", 0.02)
    for name in ("SILENCE_S", "WAITING_SILENCE_S", "LONGEST_SILENCE_S"):
        monkeypatch.setattr(poll_schedule, name, 0.05)


class LossyDispatch:
    """Drops, repeats and damages some pub/sub messages, but no confirmations of subscriptions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self._draw = random.Random(seed)
        self._dispatch = PubSubConnection._dispatch
        monkeypatch.setattr(PubSubConnection, "_dispatch", lambda *args: self.dispatch(*args))  # noqa: PLW0108  # a lambda also gets the connection
        self.dropped = 0

    def dispatch(self, connection: PubSubConnection, message: Any) -> None:
        draw = self._draw.random()
        if message[0] == b"message" and draw < 0.5:
            self.dropped += 1
            return
        self._dispatch(connection, message)
        if draw > 0.8:
            self._dispatch(connection, message)
        if message[0] == b"message" and draw > 0.95:
            self._dispatch(connection, [message[0], message[1], b"garbage"])


@pytest.mark.parametrize("seed", range(5))
async def test_streams_are_complete_when_messages_are_lost_repeated_or_damaged(
    redis_url: str, queue: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll_often(monkeypatch)
    lossy = LossyDispatch(monkeypatch, seed)
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        readers = [asyncio.create_task(read_all(job)) for _ in range(3)]
        await until_confirmed(client)
        await emit(attempt, 100)
        await attempt.finish(tokens=[100], text="100 ")
        for reader in readers:
            check_output(await reader, 101)
        assert lossy.dropped > 20


async def test_tokens_lost_right_before_the_end_are_yielded_before_the_stream_ends(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        stream = job.stream()
        first = asyncio.create_task(anext(stream))
        await until_confirmed(client)
        await emit(attempt, 1)
        chunks = [await first]
        with monkeypatch.context() as without_messages:
            is_lost = asyncio.Event()
            without_messages.setattr(PubSubConnection, "_dispatch", lambda *_: is_lost.set())
            await emit(attempt, 1)
            await is_lost.wait()  # the terminal event is published after the lost message
        await attempt.finish()
        check_output(chunks + [chunk async for chunk in stream], 2)


async def test_a_stream_without_any_message_is_still_complete(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll_often(monkeypatch)
    monkeypatch.setattr(PubSubConnection, "_dispatch", lambda *_: None)
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        reader = asyncio.create_task(read_all(job))
        result = asyncio.create_task(job.result(timeout=20))
        await emit(attempt, 10)
        await asyncio.sleep(0.1)
        await emit(attempt, 10)
        await attempt.finish()
        check_output(await reader, 20)
        assert len((await result).tokens) == 20


async def test_a_job_with_a_damaged_hash_fails_alone(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll_often(monkeypatch)
    monkeypatch.setattr(PubSubConnection, "_dispatch", lambda *_: None)  # only polls show progress
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        damaged, strange = await client.submit("x"), await client.submit("x")
        failing = [asyncio.create_task(damaged.result()), asyncio.create_task(read_all(damaged))]
        failing += [asyncio.create_task(strange.result()), asyncio.create_task(read_all(strange))]
        reader = asyncio.create_task(read_all(job))
        await asyncio.sleep(0.01)
        await client.redis.set(client.keys.of_job(damaged.id).job, "no hash")
        await client.redis.hset(client.keys.of_job(strange.id).job, "generated", "many")
        await emit(attempt, 10)
        outcomes: list[Any] = await asyncio.gather(*failing, return_exceptions=True)
        assert [type(one) for one in outcomes] == [ResponseError, ResponseError, ProtocolError, ProtocolError]
        assert [one.job_id for one in outcomes] == [damaged.id, damaged.id, strange.id, strange.id]
        await emit(attempt, 10)
        await attempt.finish()
        check_output(await reader, 20)


async def test_a_slow_reader_neither_loses_tokens_nor_delays_other_readers(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        count = INBOX_EVENTS + PAGE_EVENTS + 100
        async with aclosing(job.stream()) as slow:
            first = asyncio.ensure_future(anext(slow))
            fast = asyncio.create_task(read_all(job))
            await until_confirmed(client)
            await emit(attempt, count)
            await attempt.finish()
            check_output(await fast, count)
            check_output([await first, *[chunk async for chunk in slow]], count)


async def test_an_inbox_is_bounded_and_its_overflow_is_read_from_the_stream(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        reader = EventReader(client.redis, client.keys.of_job(job.id), job.id)
        with client.subscriber.listening(reader):
            await until_confirmed(client)
            await emit(attempt, 1)
            await reader.next_event(60)
            await emit(attempt, INBOX_EVENTS)
            while len(reader._ready) < INBOX_EVENTS:  # noqa: ASYNC110  # there is no event to await
                await asyncio.sleep(0.005)
            assert f"live tokens={INBOX_EVENTS + 1} ready={INBOX_EVENTS}" in repr(reader)
            await emit(attempt, 1)
            while "behind" not in repr(reader):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            events = [await reader.next_event(60) for _ in range(INBOX_EVENTS + 1)]
            assert [event.tokens for event in events if isinstance(event, TokenSpan)] == [
                (number,) for number in range(1, INBOX_EVENTS + 2)
            ]


async def test_a_gap_in_the_event_stream_is_an_error(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        await emit(attempt, 5)
        keys = client.keys.of_job(job.id)
        entries: Any = await client.redis.xrange(keys.events)
        await client.redis.xdel(keys.events, entries[3][0])
        with pytest.raises(ProtocolError, match="lost events before token 3"):
            await read_all(job)


async def test_an_ended_job_is_read_from_its_stored_output(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        await emit(attempt, 2)
        async with aclosing(job.stream()) as chunks:
            started = [await anext(chunks)]
            await emit(attempt, 2)
            await attempt.finish(tokens=[4], text="4 ")
            keys = client.keys.of_job(job.id)
            await client.redis.delete(keys.events)
            await client.redis.xadd(keys.events, {"e": b"\x80"})
            check_output(await read_all(job), 5)
            check_output(started + [chunk async for chunk in chunks], 5)
        await client.redis.hset(keys.job, "generated", 5)
        await client.redis.hdel(keys.job, "output")
        await client.redis.delete(keys.events)
        with pytest.raises(ProtocolError, match="its output and its events are missing"):
            await read_all(job)


async def test_the_timeout_applies_to_each_chunk(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub_connection, "PING_S", 600)
    async with AsyncClient(f"{redis_url}?{NEVER}", queue) as client, FakeWorker(redis_url, queue) as worker:
        job, attempt = await submit_and_start(client, worker)
        chunks: list[Chunk] = []

        async def read() -> None:
            async for chunk in job.stream(timeout=20):
                chunks.append(chunk)  # noqa: PERF401  # the test reads the list meanwhile

        reader = asyncio.create_task(read())
        await until_confirmed(client)
        for number in range(1, 5):
            advance_loop_clock(monkeypatch, 12)  # together longer than the timeout, each much shorter
            await emit(attempt, 1)
            while len(chunks) < number:
                assert not reader.done()
                await asyncio.sleep(0.005)
        advance_loop_clock(monkeypatch, 20)
        with pytest.raises(ResultTimeout, match=r"within 20 s"):
            await reader
        assert (await attempt.emit([4], "4 ")).code == "ok"


@pytest.mark.starts_processes
async def test_a_stream_says_that_redis_did_not_return_within_the_timeout(
    free_port: int, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedRedis(port=free_port) as server:
        async with AsyncClient(server.url, queue) as client, FakeWorker(server.url, queue) as worker:
            job, attempt = await submit_and_start(client, worker)
            async with aclosing(job.stream(timeout=60)) as chunks:
                await emit(attempt, 1)
                await anext(chunks)
                server.stop()
                listener = next(iter(client.subscriber._listeners.values()))[0]
                listener.reread()
                waiting = asyncio.ensure_future(anext(chunks))
                while listener.redis_error is None:  # noqa: ASYNC110  # there is no event to await
                    await asyncio.sleep(0.005)
                advance_loop_clock(monkeypatch, 60)
                with pytest.raises(
                    ResultTimeout, match=f"{job.id} has sent no chunk within 60 s: Redis cannot be read"
                ):
                    await waiting


async def test_a_thousand_streams_of_one_client_use_one_subscribed_connection(redis_url: str, queue: str) -> None:
    n_jobs, n_tokens = 1000, 4
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        jobs = await asyncio.gather(*(client.submit("x") for _ in range(n_jobs)))
        attempts = await asyncio.gather(*(worker.start_next() for _ in range(n_jobs)))
        readers = [asyncio.create_task(read_all(job)) for job in jobs]
        await until_confirmed(client, n_jobs)
        listed: Any = await client.redis.client_list()
        assert [int(one["sub"]) for one in listed if one["name"] == "llamaq-client" and one["sub"] != "0"] == [n_jobs]
        for offset in range(n_tokens):
            increments = [attempt.increment([offset], f"{offset} ", offset=offset) for attempt in attempts]
            await worker.scripts.flush(increments, 60_000, renew=False)
            for attempt in attempts:
                attempt.text += f"{offset} "
        for attempt in attempts:
            attempt.stored, attempt.tokens = n_tokens, list(range(n_tokens))
        await asyncio.gather(*(attempt.finish(FinishReason.LENGTH) for attempt in attempts))
        for reader in readers:
            check_output(await reader, n_tokens)
        while client.subscriber.n_confirmed:  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.005)


async def test_a_flood_of_messages_does_not_block_the_event_loop(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_dispatched, n_tokens = 0, 1000
    dispatch = PubSubConnection._dispatch

    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:

        def counted(connection: PubSubConnection, message: Any) -> None:
            nonlocal n_dispatched
            # A client of another test may live in another thread, and its server answers PINGs.
            n_dispatched += connection in client.subscriber._connections.values()
            dispatch(connection, message)

        job, attempt = await submit_and_start(client, worker)
        reader = asyncio.create_task(read_all(job))
        await until_confirmed(client)
        monkeypatch.setattr(PubSubConnection, "_dispatch", counted)
        increments = []
        for number in range(n_tokens):  # one call publishes all messages, so that they arrive together
            increments.append(attempt.increment([number], f"{number} ", offset=number))
            attempt.text += f"{number} "
            attempt.tokens.append(number)
        flood = asyncio.create_task(worker.scripts.flush(increments, 60_000, renew=False))
        most = 0
        while n_dispatched < n_tokens:
            n_before = n_dispatched
            await asyncio.sleep(0)
            most = max(most, n_dispatched - n_before)
        await flood
        attempt.stored = n_tokens
        await attempt.finish()
        check_output(await reader, n_tokens)
        assert 1 < most <= MESSAGES_PER_YIELD
