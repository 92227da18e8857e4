"""The close of a client ends the calls of other tasks, cancels their jobs and closes all connections."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from redis.asyncio import Redis
from tests.support.ports import HOST

from llamaq.common.redis import connect
from llamaq.producer import AsyncClient, Client, auto_cancelled_jobs, blocking_portal
from llamaq.producer.testing import FakeWorker

SOON_S = 10.0
CLOSED = "RuntimeError('this client was closed during the call')"
TEXTS = [str(number) for number in range(6)]


async def read_all(chunks: AsyncIterator[object]) -> None:
    async for _ in chunks:
        pass


async def ends_of(redis_url: str, queue: str, job_ids: list[str]) -> list[str | None]:
    """Return the finish reason of each job; None: it has not ended."""
    async with AsyncClient(redis_url, queue) as observer:
        return [(await observer.job(job_id).status()).finish_reason for job_id in job_ids]


async def wait_for_jobs(client: AsyncClient, n_jobs: int) -> None:
    """Wait until `n_jobs` jobs are in the queue."""
    while (await client.queue_depth()).waiting < n_jobs:  # noqa: ASYNC110  # the jobs are in Redis
        await asyncio.sleep(0.01)


async def test_calls_of_other_tasks_end_and_their_jobs_are_cancelled(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        kept, stream = await client.submit("kept"), await client.stream("a stream")
        reading = asyncio.create_task(read_all(stream))
        calls = [client.generate("a call"), kept.result(), read_all(kept.stream())]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await wait_for_jobs(client, 3)
        (called,) = {job.job_id for job in await client.jobs()} - {kept.id, stream.job.id}
    async with asyncio.timeout(SOON_S):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait([reading])  # it gets the end of its job, or the error
    assert [repr(outcome) for outcome in outcomes] == [CLOSED] * 3
    assert reading.exception() is None or repr(reading.exception()) == repr(outcomes[0])
    assert await ends_of(redis_url, queue, [called, stream.job.id, kept.id]) == ["cancelled", "cancelled", None]


async def test_a_call_that_submits_while_the_client_closes_leaves_no_job(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.queue_depth()  # connects
        task = asyncio.create_task(client.generate("a call"))
        await asyncio.sleep(0)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(RuntimeError, match="closed"):
            await task
    async with AsyncClient(redis_url, queue) as observer:
        assert (await observer.queue_depth()).waiting == 0


async def test_a_failure_beside_a_call_cancels_the_job_of_this_call(redis_url: str, queue: str) -> None:
    async def fail() -> None:
        await wait_for_jobs(client, 1)
        raise KeyError

    with pytest.raises(KeyError):
        async with AsyncClient(redis_url, queue) as client:
            await asyncio.gather(client.generate("a call"), fail())
    async with AsyncClient(redis_url, queue) as observer:
        assert (await observer.queue_depth()).waiting == 0


async def test_a_closed_client_can_be_used_again(redis_url: str, queue: str) -> None:
    client = AsyncClient(redis_url, queue)
    for _ in range(2):
        async with client:
            job = await client.submit("x")
            waiting = asyncio.create_task(job.result())
            await asyncio.sleep(0)
            await job.cancel()
            assert (await waiting).job_id == job.id


async def connection_ids(redis: Redis) -> set[str]:
    """Return the connections of clients. Redis also has the clients of other tests."""
    return {one["id"] for one in await redis.client_list() if one["name"] == "llamaq-client"}


@asynccontextmanager
async def paused(redis: Redis) -> AsyncGenerator[None, None]:
    """Let Redis answer no command that writes."""
    await redis.client_pause(60_000, all=False)
    try:
        yield
    finally:
        await redis.client_unpause()


Call = Callable[[AsyncClient], Awaitable[object]]

CALLS: dict[str, Call] = {
    "generate": lambda client: client.generate("x"),
    "stream": lambda client: client.stream("x"),
    "progress": lambda client: client.stream("x", prompt_progress=True),
    "submit": lambda client: client.submit("x"),
    "submit_many": lambda client: client.submit_many([{"prompt": "x"}]),
    "embed": lambda client: client.embed(TEXTS * 20),
    "map": lambda client: read_all(client.map(TEXTS, window=4)),
    "map_errors": lambda client: read_all(client.map(TEXTS, window=4, raise_errors=False)),
    "tokenize": lambda client: client.tokenize("x"),
    "slots": lambda client: client.slots(),
    "purge": lambda client: client.purge(),
}


async def close_during(client: AsyncClient, redis: Redis, call: Call) -> str:
    """Close the client during a call, check that nothing is left, and return the error of the call."""
    of_others = await connection_ids(redis)
    task = asyncio.ensure_future(call(client))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(SOON_S):
        await client.aclose()
        await asyncio.wait([task])
    error = repr(task.exception())
    assert asyncio.all_tasks() == {asyncio.current_task()}
    async with asyncio.timeout(SOON_S):
        while await connection_ids(redis) - of_others:  # noqa: ASYNC110  # Redis notices the end of a connection a little later
            await asyncio.sleep(0.01)
    return error


@pytest.mark.parametrize("name", ["generate", "embed", "map", "map_errors", "tokenize", "slots"])
async def test_a_close_leaves_no_job_and_no_connection(redis_url: str, queue: str, name: str) -> None:
    async with FakeWorker(redis_url, queue) as worker:
        await worker.announce(now_ms=int(time.time() * 1000))
        client = AsyncClient(redis_url, queue)
        assert await close_during(client, worker.redis, CALLS[name]) == CLOSED
        assert (await client.queue_depth()).waiting == 0
        await client.aclose()


@pytest.mark.parametrize("name", CALLS)
async def test_a_close_ends_each_call_while_redis_does_not_answer(
    redis_url: str, queue: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_cancelled_jobs, "CLOSE_WAIT_S", 0.3)
    async with FakeWorker(redis_url, queue) as worker:
        await worker.announce(now_ms=int(time.time() * 1000))
        client = AsyncClient(redis_url, queue)
        await client.redis.ping()
        async with paused(worker.redis):
            assert await close_during(client, worker.redis, CALLS[name]) == CLOSED


async def test_jobs_of_a_map_that_redis_gets_during_the_close_are_cancelled(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as observer:
        await observer.queue_depth()
        client = AsyncClient(redis_url, queue)
        async with paused(observer.redis):
            mapping = asyncio.create_task(read_all(client.map(TEXTS, window=4, raise_errors=False)))
            await asyncio.sleep(0.2)
            closing = asyncio.create_task(client.aclose())
            await asyncio.sleep(0.2)
            assert not closing.done()
        async with asyncio.timeout(SOON_S):
            await closing
            await asyncio.wait([mapping])
        assert repr(mapping.exception()) == CLOSED
        assert (await observer.queue_depth()).waiting == 0


async def test_a_close_ends_a_map_whose_reader_is_busy(redis_url: str, queue: str) -> None:
    async with FakeWorker(redis_url, queue) as worker:
        client = AsyncClient(redis_url, queue)
        results = client.map(TEXTS, window=2)
        first = asyncio.ensure_future(anext(results))
        job = await worker.start_next()
        await job.answer(["one"])
        await first
        await wait_for_jobs(client, 2)
        await client.aclose()
        with pytest.raises(RuntimeError, match="closed"):
            await anext(results)
        assert (await client.queue_depth()).waiting == 0
        await client.aclose()


async def test_a_cancellation_by_the_caller_stays_one_during_a_close(redis_url: str, queue: str) -> None:
    client = AsyncClient(redis_url, queue)
    task = asyncio.create_task(client.generate("x"))
    await wait_for_jobs(client, 1)
    task.cancel()
    await client.aclose()
    assert task.cancelled()


async def test_two_tasks_may_close_a_client_at_once(redis_url: str, queue: str) -> None:
    client = AsyncClient(redis_url, queue)
    mapping = asyncio.create_task(read_all(client.map(TEXTS)))
    await wait_for_jobs(client, 6)
    await asyncio.gather(client.aclose(), client.aclose())
    await asyncio.wait([mapping])
    assert repr(mapping.exception()) == CLOSED
    assert (await client.queue_depth()).waiting == 0
    await client.aclose()


async def test_a_task_whose_call_was_ended_continues(redis_url: str, queue: str) -> None:
    client = AsyncClient(redis_url, queue)

    async def call() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            await client.generate("x")
        async with asyncio.timeout(SOON_S):
            await asyncio.sleep(0)

    task = asyncio.create_task(call())
    await wait_for_jobs(client, 1)
    await client.aclose()
    await task
    assert task.cancelling() == 0


@asynccontextmanager
async def silent_tls_server(folder: Path) -> AsyncGenerator[str, None]:
    """Yield the URL of a server that becomes silent after it has replied to two commands of a connection.

    The commands are CLIENT SETNAME, and ZRANGE for the list of workers, which is empty.
    """
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    writers: list[asyncio.StreamWriter] = []

    async def reply_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        for reply in (b"+OK\r\n", b"*0\r\n"):
            await reader.read(1000)
            writer.write(reply)
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    async with await asyncio.start_server(reply_twice, HOST, 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"rediss://{HOST}:{port}?ssl_ca_certs={folder / 'ca.pem'}&socket_connect_timeout=600"
        for writer in writers:
            writer.transport.abort()
            await writer.wait_closed()


async def test_a_client_is_closed_within_a_second_although_its_tls_server_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_cancelled_jobs, "CLOSE_WAIT_S", 600.0)
    monkeypatch.setattr(blocking_portal, "STOP_TIMEOUT_S", 600.0)
    assert connect.CLOSE_TIMEOUT_S < 1
    async with silent_tls_server(tmp_path) as url:
        client, blocking = AsyncClient(url), Client(url)
        assert await client.workers() == await asyncio.to_thread(blocking.workers) == ()
        for close in (client.aclose, lambda: asyncio.to_thread(blocking.close)):
            async with asyncio.timeout(20):  # every other limit is longer
                await close()
