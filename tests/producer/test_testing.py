"""`llamaq.producer.testing`: the fake worker reports its own errors to the test that uses it."""

from __future__ import annotations

import threading

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import Client, InvalidRequest, JobFailed
from llamaq.producer.embed_and_rerank import join_results
from llamaq.producer.testing import fake_embedding, serving


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


def test_the_error_of_an_answer_is_raised_also_if_the_body_has_failed(redis_url: str, queue: str) -> None:
    def answer(_: JobRequest) -> list[str]:
        raise ZeroDivisionError("in the test's own code")

    with (
        pytest.raises(ZeroDivisionError) as caught,
        serving(redis_url, queue, answer),
        Client(redis_url, queue) as client,
    ):
        client.generate("one")
    assert isinstance(caught.value.__context__, JobFailed)


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
