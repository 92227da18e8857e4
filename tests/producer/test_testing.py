"""`llamaq.producer.testing`: the fake worker does what the test decides, and reports its own errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import AsyncClient, Client, FinishReason, InvalidRequest, JobFailed
from llamaq.producer.embed_and_rerank import join_results
from llamaq.producer.testing import FakeWorker, fake_embedding, serving


@pytest.mark.slow
def test_a_fake_worker_that_cannot_start_raises_its_error_instead_of_waiting() -> None:
    with pytest.raises(RedisConnectionError), serving("redis://127.0.0.1:1", "q", lambda _: []):
        pytest.fail("the context was entered")


def test_the_error_of_an_answer_is_raised_at_the_end(redis_url: str, queue: str) -> None:
    called = threading.Event()

    def answer(_: JobRequest) -> list[str]:
        called.set()
        raise ZeroDivisionError("in the test's own code")

    def use_worker() -> None:
        with serving(redis_url, queue, answer), Client(redis_url, queue) as client:
            client.submit("one")
            assert called.wait(60)

    with pytest.raises(ZeroDivisionError):
        use_worker()


def test_the_error_of_the_body_is_raised_with_that_of_the_answer_as_a_note(redis_url: str, queue: str) -> None:
    """Otherwise a test that expects the error of `answer` would pass in spite of its failed assertions."""

    def answer(_: JobRequest) -> list[str]:
        raise ZeroDivisionError("in the test's own code")

    def use_worker() -> None:
        with serving(redis_url, queue, answer), Client(redis_url, queue) as client:
            with pytest.raises(JobFailed, match="in the test's own code"):
                client.generate("one")
            raise AssertionError("a wrong expectation")

    with pytest.raises(AssertionError, match="a wrong expectation") as caught:
        use_worker()
    (note,) = caught.value.__notes__
    assert "ZeroDivisionError" in note


def test_the_error_of_the_body_alone_has_no_note(redis_url: str, queue: str) -> None:
    with pytest.raises(AssertionError) as caught, serving(redis_url, queue, lambda _: []):
        raise AssertionError("a wrong expectation")
    assert not hasattr(caught.value, "__notes__")


def test_a_job_failed_of_an_answer_fails_only_that_job(redis_url: str, queue: str) -> None:
    def answer(request: JobRequest) -> Iterator[str]:
        yield "some text"
        if request.prompt == "bad":
            raise JobFailed("invalid_grammar", "the reason in words")

    with serving(redis_url, queue, answer), Client(redis_url, queue, timeout_s=60) as client:
        stream = client.stream("bad")
        assert next(stream).text == "some text"
        with pytest.raises(JobFailed, match="the reason in words") as caught:
            next(stream)
        assert caught.value.code == "invalid_grammar"
        assert client.generate("good").text == "some text"


def test_each_piece_of_a_generator_is_sent_before_the_next_is_read(redis_url: str, queue: str) -> None:
    received = threading.Event()

    def answer(_: JobRequest) -> Iterator[str]:
        yield "one"
        assert received.wait(60)
        yield "two"

    with serving(redis_url, queue, answer), Client(redis_url, queue, timeout_s=30) as client:
        stream = client.stream("x")
        assert next(stream).text == "one"
        received.set()
        assert "".join(stream.text()) == "two"


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_job_ends_its_endless_answer(redis_url: str, queue: str, stream: bool) -> None:
    started, left = threading.Event(), threading.Event()

    def answer(_: JobRequest) -> Iterator[str]:
        try:
            while True:
                yield "word "
                started.set()
        finally:
            left.set()

    with serving(redis_url, queue, answer), Client(redis_url, queue, timeout_s=60) as client:
        job = client.submit("x", stream=stream)
        assert started.wait(60)
        job.cancel()
        assert left.wait(60)
        result = job.result()
    assert (result.finish_reason, result.text[:5]) == (FinishReason.CANCELLED, "word ")


async def test_a_fake_worker_is_listed_with_the_time_of_its_heartbeat_until_its_context_ends(
    redis_url: str, queue: str
) -> None:
    async with AsyncClient(redis_url, queue) as client:
        async with FakeWorker(redis_url, queue) as worker:
            await worker.announce()
            (listed,) = await client.workers()
            assert abs(listed.heartbeat_ms / 1000 - time.time()) < 60
        assert await client.workers() == ()


def test_each_queue_lists_its_fake_worker_until_the_context_ends(redis_url: str, queue: str) -> None:
    other = f"{queue}-other"
    with Client(redis_url, queue) as client, Client(redis_url, other) as other_client:
        with serving(redis_url, queue, lambda _: ["a"]):
            with serving(redis_url, other, lambda _: ["b"]):
                assert [worker.card.queue for worker in other_client.workers()] == [other]
            assert [worker.card.queue for worker in client.workers()] == [queue]
        assert client.workers() == other_client.workers() == ()


def test_a_fake_worker_embeds_texts_in_several_jobs(redis_url: str, queue: str) -> None:
    texts = [f"text {number}" for number in range(70)]
    with serving(redis_url, queue, lambda _: ["text"]), Client(redis_url, queue, timeout_s=60) as client:
        found = client.embed(texts, idempotency_key="once", tenant="a", priority="bulk")
        again = client.embed(texts, idempotency_key="once")
        n_jobs = len(client.stats().recent)
        ranking = client.rerank("query", texts[:5])
        with pytest.raises(InvalidRequest, match="at least one text"):
            client.embed([])
        with pytest.raises(InvalidRequest, match="documents for a query must be texts"):
            client.rerank("query", [[1, 2]])  # type: ignore[list-item]
        with pytest.raises(JobFailed, match="ended with 'stop' before all its embeddings"):
            join_results([client.generate("text")])
    assert found == again == tuple(map(fake_embedding, texts))
    assert n_jobs == 3
    assert [one.score for one in ranking] == sorted((fake_embedding(each).score for each in texts[:5]), reverse=True)


def test_the_job_of_an_answer_that_raises_fails_with_the_text_of_the_error(redis_url: str, queue: str) -> None:
    def answer(_: JobRequest) -> list[str]:
        raise AssertionError("not this prompt")

    with (
        pytest.raises(AssertionError, match="not this prompt"),
        serving(redis_url, queue, answer),
        Client(redis_url, queue) as client,
        pytest.raises(JobFailed, match="not this prompt"),
    ):
        client.generate("x")
