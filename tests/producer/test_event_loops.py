"""A client works in one event loop after the other, and says clearly that it cannot work in two loops at once."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator

import pytest

from llamaq.producer import AsyncClient, AsyncJob, AsyncStream, FinishReason
from llamaq.producer.testing import serving

# Only an event loop can close its sockets. After the loop was closed, they stay open until they are garbage collected.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def collect_garbage() -> Iterator[None]:
    yield
    gc.collect()


def test_a_client_works_in_one_event_loop_after_the_other(redis_url: str, queue: str) -> None:
    client = AsyncClient(redis_url, queue)

    async def read() -> str:
        stream = await client.stream("a b")
        return "".join([chunk.text async for chunk in stream])

    with serving(redis_url, queue, lambda request: (request.prompt or "").split(" ")):
        assert [asyncio.run(read()) for _ in range(3)] == ["ab", "ab", "ab"]
        assert asyncio.run(client.generate("c d")).text == "cd"
    asyncio.run(client.aclose())


def test_a_job_handle_of_an_earlier_event_loop_works(redis_url: str, queue: str) -> None:
    client = AsyncClient(redis_url, queue)
    job: AsyncJob = asyncio.run(client.submit("x"))

    async def cancel_and_close() -> FinishReason:
        assert await job.cancel()
        reason = (await job.result()).finish_reason
        await client.aclose()
        return reason

    assert asyncio.run(cancel_and_close()) is FinishReason.CANCELLED


def test_a_stream_that_a_closed_loop_left_open_is_cancelled_by_the_close(redis_url: str, queue: str) -> None:
    client = AsyncClient(redis_url, queue)
    stream = asyncio.run(client.stream("x"))

    async def close() -> bool:
        await client.aclose()
        async with AsyncClient(redis_url, queue) as other:
            return (await other.job(stream.job.id).status()).finish_reason is FinishReason.CANCELLED

    assert asyncio.run(close())


async def test_a_second_event_loop_at_the_same_time_is_refused_with_the_way_out(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.queue_depth()
        errors: list[BaseException] = []

        def use_elsewhere() -> None:
            try:
                asyncio.run(client.generate("x"))
            except RuntimeError as exc:
                errors.append(exc)

        thread = threading.Thread(target=use_elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
        with pytest.raises(RuntimeError, match="create one AsyncClient in each event loop, or use Client"):
            raise errors[0]
        assert (await client.queue_depth()).waiting == 0, "the client still works in its own loop"


async def test_a_stream_that_is_read_in_a_second_loop_is_cancelled_in_its_own(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="asyncio")
    async with AsyncClient(redis_url, queue) as client:
        stream = await client.stream("x")

        async def read_and_close() -> None:
            with pytest.raises(RuntimeError, match="create one AsyncClient in each event loop"):
                await anext(stream)
            with pytest.raises(RuntimeError, match="create one AsyncClient in each event loop"):
                await client.aclose()

        await asyncio.to_thread(asyncio.run, read_and_close())
        assert (await stream.job.result()).finish_reason is FinishReason.CANCELLED
        gc.collect()
        assert caplog.records == []


def test_a_stream_that_a_closed_loop_has_ended_does_not_look_complete_in_the_next_loop(
    redis_url: str, queue: str
) -> None:
    client = AsyncClient(redis_url, queue)

    async def begin() -> AsyncStream:
        stream = await client.stream("x")
        reading = asyncio.ensure_future(anext(stream._chunks))  # a reader that its loop interrupts
        await asyncio.sleep(0.05)
        reading.cancel()
        return stream

    stream = asyncio.run(begin())

    async def read() -> None:
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await anext(stream)
        await stream.aclose()
        await client.aclose()

    asyncio.run(read())
