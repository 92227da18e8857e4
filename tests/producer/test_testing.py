"""`llamaq.producer.testing`: the fake worker reports its own errors to the test that uses it."""

from __future__ import annotations

import threading

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import Client
from llamaq.producer.testing import serving


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
