"""RQ queues with the JSON serializer, and RQ workers in this process and in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer
from rq.timeouts import TimerDeathPenalty


class InProcessWorker(SimpleWorker):
    """Executes jobs in this process. It leaves the signals to pytest, whose timeout needs SIGALRM."""

    death_penalty_class = TimerDeathPenalty

    def _install_signal_handlers(self) -> None:
        pass


def work(queue: Queue) -> None:
    """Execute the jobs of a queue until it is empty."""
    InProcessWorker([queue], connection=queue.connection, serializer=JSONSerializer).work(
        burst=True, logging_level="WARNING"
    )


@pytest.fixture
def rq_redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as redis:
        yield redis


@pytest.fixture
def rq_queue(rq_redis: Redis, queue: str) -> Queue:
    return Queue(f"rq-{queue}", connection=rq_redis, serializer=JSONSerializer)


@pytest.fixture
def llamaq_settings(monkeypatch: pytest.MonkeyPatch, redis_url: str, queue: str) -> dict[str, Any]:
    """The settings of llamaq in the environment, from which functions in RQ jobs read them."""
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    return {"redis_url": redis_url, "queue": queue}
