"""`map` computes any number of requests, with a bounded number of jobs in the queue."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.exceptions import ResponseError
from tests.support.numbered_streams import until_confirmed
from tests.support.redis_servers import wait_until

from llamaq.common.errors import ErrorCode, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.keys import Keys
from llamaq.producer import AsyncClient, Client, InvalidRequest, MappedResult, RequestFailed
from llamaq.producer.testing import FakeWorker, serving


@pytest.fixture
def prompts(redis_url: str, queue: str) -> Iterator[list[str]]:
    """The prompts that the worker of the queue has answered, each with itself."""
    seen: list[str] = []

    def answer(request: JobRequest) -> list[str]:
        seen.append(request.prompt or "")
        return ["re: ", request.prompt or ""]

    with serving(redis_url, queue, answer):
        yield seen


@pytest.fixture
def client(redis_url: str, queue: str) -> Iterator[Client]:
    with Client(redis_url, queue) as client:
        yield client


def numbered() -> Iterator[str]:
    return (f"{n}" for n in range(20))


EXPECTED = [(n, f"re: {n}") for n in range(20)]


def test_results_have_the_order_of_the_requests(client: Client, prompts: list[str]) -> None:
    assert [(result.index, result.text) for result in client.map(numbered(), window=5)] == EXPECTED
    unordered = client.map(({"prompt": prompt} for prompt in numbered()), ordered=False, max_tokens=3)
    assert sorted((result.index, result.text) for result in unordered) == EXPECTED
    assert len(prompts) == 40


def test_a_generator_runs_in_the_thread_of_the_caller_and_may_use_the_client(
    client: Client, prompts: list[str]
) -> None:
    chained = (client.generate(prompt).text for prompt in ("a", "b"))
    assert [result.text for result in client.map(chained)] == ["re: re: a", "re: re: b"]


def test_an_error_is_raised_or_returned_with_its_index(client: Client, prompts: list[str]) -> None:
    requests: list[str | dict[str, Any]] = ["a", {"prompt": "b", "max_tokns": 1}, "c"]
    first, failed, last = client.map(requests, raise_errors=False)
    assert isinstance(first, MappedResult)
    assert isinstance(last, MappedResult)
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, InvalidRequest)
    assert (first.index, first.text, failed.index, last.index, last.text) == (0, "re: a", 1, 2, "re: c")
    with pytest.raises(RequestFailed, match=r"requests\[1\]: max_tokns: .* did you mean max_tokens"):
        list(client.map(requests))
    with pytest.raises(InvalidRequest, match="window"):
        list(client.map(requests, window=0))

    def broken() -> Iterator[str]:
        yield "a"
        raise LookupError("the source is broken")

    with pytest.raises(LookupError, match="the source is broken"):
        list(client.map(broken()))


def test_the_same_name_returns_the_results_of_an_earlier_call(client: Client, prompts: list[str]) -> None:
    for _ in range(2):
        assert [(result.index, result.text) for result in client.map(numbered(), resume="mine")] == EXPECTED
    assert len(prompts) == 20
    same = [{"prompt": "x", "idempotency_key": "same"}] * 3
    assert [result.text for result in client.map(same)] == ["re: x"] * 3
    assert len(prompts) == 21
    with pytest.raises(RequestFailed, match="idempotency_key"):
        list(client.map(["another request"], resume="mine"))


def test_leaving_the_loop_cancels_the_jobs_in_flight(client: Client) -> None:
    client.pause()  # jobs stay in the queue
    with pytest.raises(RequestFailed):
        list(client.map(itertools.chain(["a", "b"], [{"prompt": "x", "max_tokns": 1}]), ordered=False, window=2))
    assert client.queue_depth().waiting == 0
    client.resume()


def test_no_more_requests_are_read_than_the_window_has_room_for(client: Client, prompts: list[str]) -> None:
    read = itertools.count()
    for result in client.map((str(n) for n in read), window=10):
        if result.index == 3:
            break
    assert next(read) <= 3 + 2 * 10 + 1  # requests that were read
    wait_until(lambda: client.queue_depth().waiting + client.queue_depth().running == 0, "an empty queue")


async def test_the_asyncio_client_takes_asynchronous_generators(redis_url: str, queue: str, prompts: list[str]) -> None:
    async def numbers() -> AsyncIterator[str]:
        for prompt in numbered():
            await asyncio.sleep(0)
            yield prompt

    async with AsyncClient(redis_url, queue) as client:
        assert [(result.index, result.text) async for result in client.map(numbers(), window=5)] == EXPECTED
        results = client.map(str(n) for n in itertools.count())
        assert (await anext(results)).text == "re: 0"
        await results.aclose()
        while (depth := await client.queue_depth()).waiting + depth.running:  # noqa: ASYNC110  # Redis has no event
            await asyncio.sleep(0.01)


async def test_a_request_that_redis_refuses_leaves_no_job_of_the_others(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.connection.redis.rpush(Keys().idempotency(queue, 0, "run:1"), "not a job id")
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            async for _ in client.map(["a", "b", "c"], resume="run"):
                pass
        assert (await client.queue_depth()).waiting == 0


async def test_a_damaged_job_fails_alone(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:

        async def damage(job_id: str, values: dict[Any, Any]) -> None:
            """Overwrite fields of a job, and let the client read it."""
            keys = client.keys.of_job(job_id)
            await client.redis.hset(keys.job, mapping=values)
            await client.redis.publish(keys.channel, codec.encode_event(Failed(code=ErrorCode.INTERNAL, message="x")))

        async def results() -> list[Any]:
            return [result async for result in client.map(["state", "end", "good"], raise_errors=False)]

        mapped = asyncio.create_task(results())
        attempts = [await worker.start_next() for _ in range(3)]
        state, end, good = sorted(attempts, key=lambda one: ["state", "end", "good"].index(one.request.prompt or ""))
        await until_confirmed(client, 3)
        await damage(state.claim.job_id, {"generated": "many"})
        await damage(end.claim.job_id, {"status": "finished", "finish_reason": "unknown"})
        await good.answer(["a"])
        first, second, third = await mapped
        assert [type(one.error) for one in (first, second)] == [ProtocolError, ProtocolError]
        assert third.text == "a"
