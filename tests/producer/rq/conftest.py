"""RQ queues with the JSON serializer, and RQ workers in this process and in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from redis import Redis
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer
from rq.timeouts import TimerDeathPenalty


class SignalDeathPenalty(TimerDeathPenalty):
    """Raises the timeout of a job in a handler of SIGUSR1, because the timeout of pytest needs SIGALRM.

    While coverage traces Python 3.11, the asynchronous exception of `TimerDeathPenalty` arrives only after minutes:
    until then, all other threads use the processor.
    """

    def setup_death_penalty(self) -> None:
        signal.signal(signal.SIGUSR1, self.raise_timeout)
        super().setup_death_penalty()

    def handle_death_penalty(self) -> None:
        signal.pthread_kill(self._target_thread_id, signal.SIGUSR1)

    def raise_timeout(self, *_: object) -> NoReturn:
        raise self._exception


class InProcessWorker(SimpleWorker):
    """Executes jobs in this process. It leaves the signals to pytest, whose timeout needs SIGALRM."""

    death_penalty_class = TimerDeathPenalty

    def _install_signal_handlers(self) -> None:
        pass


class MainThreadWorker(InProcessWorker):
    """Executes jobs in the main thread, and lets them reach their timeouts."""

    death_penalty_class = SignalDeathPenalty


def work(queue: Queue, worker: type[InProcessWorker] = InProcessWorker) -> None:
    """Execute the jobs of a queue until it is empty."""
    worker([queue], connection=queue.connection, serializer=JSONSerializer).work(burst=True, logging_level="WARNING")


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
