"""Running jobs wait while the memory of Redis is at `maxmemory`, and continue when Redis has free memory again."""

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
    """A Redis for one test, whose memory the test limits."""
    with EmbeddedRedis() as server:
        environment.redis_url = server.url
        with Redis.from_url(server.url) as redis:
            yield redis
        environment.close()


def fill(redis: Redis) -> None:
    """Fill Redis, so that it refuses every write, even when its client buffers shrink and free some memory."""
    redis.setrange("ballast", BALLAST_BYTES, b"x")
    redis.config_set("maxmemory", redis.info("memory")["used_memory"] - BALLAST_BYTES // 2)


def test_running_jobs_wait_while_redis_is_full_and_continue_at_the_next_token(
    environment: Environment, read: Read, redis: Redis
) -> None:
    options = ("--n-parallel", "2", "--inbox-window", "0", "--lease-s", str(LEASE_S))
    worker = environment.start_worker(*options)
    with environment.client() as client:
        reader = read(client.submit(PROMPT, max_tokens=400, ignore_eos=True, temperature=0))
        quiet = client.submit(PROMPT, max_tokens=300, ignore_eos=True, stream=False)
        reader.await_tokens(10)
        other = environment.start_worker(*options)  # it would claim a job whose lease expires
        other.signal(signal.SIGSTOP)
        waiting = [client.submit(PROMPT, max_tokens=5, ignore_eos=True) for _ in range(12)]
        fill(redis)
        other.signal(signal.SIGCONT)
        worker.await_output("outbox.redis_full")
        other.await_output("intake.redis_full")
        with pytest.raises(RedisFull):
            client.submit(PROMPT)
        n_stalled = reader.n_tokens
        time.sleep(3 * LEASE_S)  # longer than the leases, which must be renewed meanwhile
        assert reader.n_tokens == n_stalled
        # Every start fails, so each worker claims at most one job per slot. Two more jobs may have left their slots.
        assert client.queue_depth().running <= 2 + 2 + 2
        redis.delete("ballast")

        assert len(reader.finish().tokens) == 400
        assert len(quiet.result().tokens) == 300
        for job in waiting:
            assert len(job.result().tokens) == 5
        attempts = [event.worker for event in environment.events_of(reader.job) if isinstance(event, Started)]
        assert attempts == [worker.worker_id], "the lease of the job expired"
        for one in (worker, other):
            assert len(re.findall(r"WARNING .*redis_full", one.output)) <= 3, (
                "more than one warning each of outbox, heartbeat and intake"
            )
            one.signal(signal.SIGTERM)
            assert one.end() == 0
