"""A Redis that has reached its `maxmemory`: running jobs wait, and continue when it has free memory."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from redis import Redis

from llamaq.common.protocol.job_events import Started
from llamaq.producer import Job, RedisFull
from llamaq.worker.local.embedded_redis import EmbeddedRedis

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment, Reader

    Read = Callable[[Job], Reader]

PROMPT = "Once upon a time"
LEASE_S = 1.0
BALLAST_BYTES = 20_000_000


@pytest.fixture
def redis(environment: Environment) -> Iterator[Redis]:
    """A Redis for one test, which limits its memory."""
    with EmbeddedRedis() as server:
        environment.redis_url = server.url
        with Redis.from_url(server.url) as redis:
            yield redis
        environment.close()


def fill(redis: Redis) -> None:
    """Fill Redis, so that no write fits, also after client buffers have shrunk."""
    redis.setrange("ballast", BALLAST_BYTES, b"x")
    redis.config_set("maxmemory", redis.info("memory")["used_memory"] - BALLAST_BYTES // 2)


def test_running_jobs_wait_while_redis_is_full_and_go_on_exactly_where_they_were(
    environment: Environment, read: Read, redis: Redis
) -> None:
    options = ("--n-parallel", "2", "--inbox-window", "0", "--lease-s", str(LEASE_S))
    worker = environment.start_worker(*options)
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=400, ignore_eos=True, temperature=0))
        quiet = client.submit(PROMPT, max_tokens=300, ignore_eos=True, stream=False)
        reader.await_tokens(10)
        other = environment.start_worker(*options)  # claims every job that the first worker loses
        other.signal(signal.SIGSTOP)
        waiting = [client.submit(PROMPT, max_tokens=5, ignore_eos=True) for _ in range(12)]
        fill(redis)
        other.signal(signal.SIGCONT)
        worker.await_output("outbox.redis_full")
        other.await_output("intake.redis_full")
        with pytest.raises(RedisFull):
            client.submit(PROMPT)
        n_stalled = reader.n_tokens
        time.sleep(3 * LEASE_S)  # longer than the lease, which must be renewed
        assert reader.n_tokens == n_stalled
        # Though every start fails, no more are claimed than there are slots; two jobs may have left theirs meanwhile.
        assert client.queue_depth().running <= 2 + 2 + 2
        redis.delete("ballast")

        assert len(reader.finish().tokens) == 400
        assert len(quiet.result().tokens) == 300
        for job in waiting:
            assert len(job.result().tokens) == 5
        attempts = [event.worker for event in environment.events_of(reader.job) if isinstance(event, Started)]
        assert attempts == [worker.worker_id], "its lease was renewed all the time"
        for one in (worker, other):
            assert len(re.findall(r"WARNING .*redis_full", one.output)) <= 3, "one of each: outbox, heartbeat, intake"
            one.signal(signal.SIGTERM)
            assert one.end() == 0
