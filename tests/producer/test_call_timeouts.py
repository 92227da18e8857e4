"""The timeout of a call bounds whatever the call waits for, and its errors name the job."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from redis.exceptions import BusyLoadingError, NoPermissionError
from tests.producer.conftest import AfterTimeout, until_waiting
from tests.support.loop_clock import advance_loop_clock
from tests.support.numbered_streams import until_confirmed

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import (
    AsyncClient,
    FinishReason,
    JobFailed,
    JobState,
    NoWorker,
    QueueDepth,
    Result,
    ResultTimeout,
    auto_cancelled_jobs,
    embed_and_rerank,
)
from llamaq.producer.auto_cancelled_jobs import AutoCancelledJobs
from llamaq.producer.call_timeout import CallTimeout
from llamaq.producer.queries.job_records import read_result
from llamaq.producer.testing import FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis

NEVER = "socket_timeout=600"
"""A parameter of a URL: only the timeout of the call can end a wait for a reply before the test fails."""


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Yield the URL of a server that accepts connections and never replies."""
    connected: set[asyncio.StreamWriter] = set()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.add(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0?{NEVER}"
    finally:
        for writer in connected:
            writer.close()
        server.close()


async def test_a_timeout_bounds_the_submit_to_a_silent_redis(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_cancelled_jobs, "CLOSE_WAIT_S", 0.1)
    async with silent_server() as url, AsyncClient(url, queue) as client:
        with pytest.raises(ResultTimeout, match=r"could not be submitted: Redis has not answered within 0\.2 s") as one:
            await client.generate("hello", timeout=0.2)
        with pytest.raises(ResultTimeout, match="could not be submitted"):
            await client.stream("hello", timeout=0.2)
        assert one.value.job_id is not None
        assert one.value.job_id.startswith(f"{queue}.")


@pytest.mark.starts_processes
async def test_a_timeout_bounds_the_wait_for_the_end_and_the_cancellation(
    queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_cancelled_jobs, "CLOSE_WAIT_S", 0.1)
    with EmbeddedRedis() as server:
        async with AsyncClient(f"{server.url}?{NEVER}", queue) as client, FakeWorker(server.url, queue) as worker:
            assert server.pid is not None
            await worker.announce()
            waiting = asyncio.create_task(client.generate("hello", timeout=60))
            reading = asyncio.create_task((await client.stream("hello", timeout=60)).__anext__())
            for _ in range(2):
                await worker.start_next()
            os.kill(server.pid, signal.SIGSTOP)
            advance_loop_clock(monkeypatch, 60)
            try:
                with pytest.raises(
                    ResultTimeout, match="has not finished within 60 s; its cancellation is not confirmed"
                ):
                    await waiting
                with pytest.raises(ResultTimeout, match="its cancellation is not confirmed"):
                    await reading
            finally:
                os.kill(server.pid, signal.SIGCONT)


async def test_the_error_of_a_timeout_tells_that_the_job_was_cancelled(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_cancelled_jobs, "LAST_WAIT_S", 10.0)
    async with AsyncClient(f"{redis_url}?{NEVER}", queue) as client, FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        waiting = asyncio.create_task(client.generate("hello", timeout=60))
        reading = asyncio.create_task((await client.stream("hello", timeout=60)).__anext__())
        await until_confirmed(client, 2)
        advance_loop_clock(monkeypatch, 60)
        for call in (waiting, reading):
            with pytest.raises(ResultTimeout, match=r" within 60 s; it was cancelled$"):
                await call


async def test_a_submit_ends_after_the_timeout_of_the_client(queue: str) -> None:
    async with silent_server() as url, AsyncClient(url, queue, timeout_s=0.2) as client:
        with pytest.raises(ResultTimeout, match=r"could not be submitted: Redis has not answered within 0\.2 s"):
            await client.submit("hello")


async def test_a_job_is_cancelled_although_the_timeout_ended_its_submit(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        send = client.connection.scripts.submit

        async def send_late(*args: Any, **options: Any) -> Any:
            await asyncio.sleep(0.1)
            return await send(*args, **options)

        monkeypatch.setattr(client.connection.scripts, "submit", send_late)
        with pytest.raises(ResultTimeout, match="could not be submitted"):
            await client.generate("hello", timeout=0.01)
        await client.auto_cancelled.wait_for_cancellations()
        assert await client.queue_depth() == QueueDepth(waiting=0, running=0)


@pytest.mark.slow
async def test_no_error_of_a_cancelled_submit_is_logged(
    queue: str, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(f"redis://127.0.0.1:{free_port}", queue) as client:
        waiting = asyncio.create_task(client.generate("hello"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_the_read_of_the_result_is_repeated_while_redis_loads_its_data(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_failed = 0

    async def loading(*args: Any) -> Any:
        nonlocal n_failed
        n_failed += 1
        if n_failed <= 3:
            raise BusyLoadingError("Redis is loading the dataset in memory")
        return await read_result(*args)

    monkeypatch.setattr("llamaq.producer.job_handle.read_result", loading)
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        waiting = asyncio.create_task(client.generate("hello"))
        await (await worker.start_next()).answer(["a"])
        assert (await waiting).text == "a"
        assert n_failed == 4


async def test_every_error_after_the_submit_names_the_job(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, after_timeout: AfterTimeout
) -> None:
    async def forbidden(*_: Any) -> Any:
        raise NoPermissionError("this user has no permissions to run the 'hmget' command")

    monkeypatch.setattr(auto_cancelled_jobs, "LAST_WAIT_S", 10.0)  # the search for a worker
    async with AsyncClient(f"{redis_url}?{NEVER}", queue) as client, FakeWorker(redis_url, queue) as worker:
        failing = asyncio.create_task(client.generate("hello"))
        attempt = await worker.start_next()
        await attempt.fail()
        caught = [await error_of(failing)]
        caught.append(await error_of(after_timeout(client, client.generate("hello", timeout=30))))
        await worker.announce()
        caught.append(await error_of(after_timeout(client, client.generate("hello", timeout=30))))
        monkeypatch.setattr("llamaq.producer.job_handle.read_result", forbidden)
        denied = asyncio.create_task(client.generate("hello"))
        await (await worker.start_next()).answer(["a"])
        caught.append(await error_of(denied))
        assert [type(error) for error in caught] == [JobFailed, NoWorker, ResultTimeout, NoPermissionError]
        for error in caught:
            assert error.job_id.startswith(f"{queue}.0.")
            assert error.job_id in str(error)
        assert caught[0].job_id == attempt.claim.job_id
        for error in caught[:3]:
            assert pickle.loads(pickle.dumps(error)).job_id == error.job_id  # our own bytes


async def error_of(call: Any) -> Any:
    """Return the error that a call raises."""
    outcome = (await asyncio.gather(call, return_exceptions=True))[0]
    assert isinstance(outcome, Exception)
    return outcome


async def test_a_job_with_an_idempotency_key_is_never_cancelled_by_its_caller(
    redis_url: str, queue: str, after_timeout: AfterTimeout
) -> None:
    async with AsyncClient(f"{redis_url}?{NEVER}", queue) as client, FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        first = asyncio.create_task(client.generate("hello", idempotency_key="order 7"))
        attempt = await worker.start_next()
        second = asyncio.create_task(client.generate("hello", idempotency_key="order 7"))
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        await until_waiting(client, 1)
        with pytest.raises(ResultTimeout, match="it continues, because it has an idempotency key"):
            await after_timeout(client, client.generate("hello", idempotency_key="order 7", timeout=30))
        stream = await client.stream("hello", idempotency_key="order 7")
        await stream.aclose()
        await client.auto_cancelled.wait_for_cancellations()
        assert (await client.job(attempt.claim.job_id).status()).cancel_requested is False
        await attempt.answer(["a"])
        assert (await second).text == "a"
        assert (await client.job(attempt.claim.job_id).status()).state is JobState.FINISHED


async def test_a_submit_creates_no_task(redis_url: str, queue: str) -> None:
    tasks: list[object] = []

    def record(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        tasks.append(work)
        return asyncio.Task(work, loop=loop, **options)

    async with AsyncClient(redis_url, queue) as client:
        await client.submit("the first call opens a connection")
        asyncio.get_running_loop().set_task_factory(record)
        try:
            await client.submit("hello")
        finally:
            asyncio.get_running_loop().set_task_factory(None)
    assert not tasks


async def test_a_timeout_within_a_bounded_call_is_not_the_end_of_the_call() -> None:
    async def fail() -> None:
        raise TimeoutError("of a connection")

    limit = CallTimeout(60.0)
    with pytest.raises(TimeoutError, match="of a connection"):
        await limit.bound(fail(), "job", "has not finished")
    with pytest.raises(ResultTimeout, match="has not finished within 0 s"):
        await CallTimeout(0.0).bound(asyncio.sleep(60), "job", "has not finished")


async def test_one_timeout_bounds_all_jobs_of_an_embed_call(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job would otherwise get the whole timeout when it begins, after the end of the jobs before it."""
    monkeypatch.setattr(embed_and_rerank, "MAX_JOBS_IN_FLIGHT", 1)
    monkeypatch.setattr(embed_and_rerank, "INPUTS_PER_JOB", 1)
    limits: list[CallTimeout] = []

    class LateJobs(AutoCancelledJobs):
        async def generate_within(self, request: JobRequest, limit: CallTimeout) -> Result:
            limits.append(limit)
            if len(limits) == 2:
                limit.end_s = 0.0  # the time is over now
            return Result(
                job_id="x", text="", tokens=(), seed=1, finish_reason=FinishReason.STOP, stats=JobStats(), embeddings=()
            )

    async with AsyncClient(redis_url, queue) as client:
        client.auto_cancelled = LateJobs(client.connection)
        with pytest.raises(ResultTimeout, match="4 jobs have not ended within 60 s"):
            await client.embed(["a", "b", "c", "d"], timeout=60)
    assert len(limits) == 2
    assert limits[0] is limits[1]
