"""While the memory of Redis is at `maxmemory`, new tokens wait in the workers, and claims, cancels and ends pass."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from redis import Redis
from tests.support.redis_servers import wait_until

from llamaq.common.protocol.job_events import Started
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.producer import Client, RedisFull
from llamaq.worker.local.embedded_redis import EmbeddedRedis

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment, Read

PROMPT = "Once upon a time"
LEASE_S = 3.0
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
    worker = environment.start_worker(*options, LINGER_TOKENS="200")
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
        with pytest.raises(RedisFull):
            client.submit(PROMPT)
        n_stalled = reader.job.status().generated_tokens
        wait_until(lambda: reader.n_tokens == n_stalled, "the reader has received all stored tokens")
        # For longer than the leases and the cards of workers, the first worker keeps its job: both are renewed.
        ends_s = time.monotonic() + 1.5 * LEASE_S
        while time.monotonic() < ends_s:
            assert reader.job.status().worker == worker.worker_id
            time.sleep(0.1)
        both = {worker.worker_id, other.worker_id}
        wait_until(lambda: {one.card.worker for one in client.workers()} == both, "both workers have a card")
        assert reader.n_tokens == n_stalled
        redis.delete("ballast")
        environment.let_jobs_finish()

        assert len(reader.finish().tokens) == 400
        assert len(quiet.result().tokens) == 300
        for job in waiting:
            assert len(job.result().tokens) == 5
        attempts = [event.worker for event in environment.events_of(reader.job) if isinstance(event, Started)]
        assert attempts == [worker.worker_id], "the lease of the job expired"
        for one in (worker, other):
            assert len(re.findall(r"WARNING .*redis_full", one.output)) <= 3, (
                "more than one warning each of outbox, heartbeat and queue membership"
            )
            one.signal(signal.SIGTERM)
            assert one.end() == 0


def n_claimed(redis: Redis, client: Client) -> int:
    """Return the number of jobs that a worker has claimed and that have not ended."""
    streams = [Keys().jobs(client.queue, 0, priority) for priority in Priority]
    return sum(redis.xpending(stream, GROUP)["pending"] for stream in streams)


def test_a_full_queue_drains_itself_although_redis_is_full(environment: Environment, redis: Redis) -> None:
    worker = environment.start_worker("--n-parallel", "2", "--inbox-window", "0", "--lease-s", str(LEASE_S))
    with environment.client() as client:
        running = client.submit(PROMPT, max_tokens=1500, ignore_eos=True)
        wait_until(lambda: running.status().generated_tokens, "the first token")
        jobs = [client.submit(PROMPT, max_tokens=5, ignore_eos=True) for _ in range(8)]
        waiting = client.submit(PROMPT, max_tokens=1500, ignore_eos=True, priority="bulk", queue_timeout_s=600)
        fill(redis)
        assert waiting.cancel()
        assert waiting.result(timeout=10).finish_reason == "cancelled"
        claimed: list[int] = []

        def have_ended() -> bool:
            claimed.append(n_claimed(redis, client))
            return all(job.status().state == "finished" for job in jobs)

        wait_until(have_ended, "all short jobs have ended")
        assert max(claimed) <= 2 + 1, "two slots, and the next job may be read before an end is stored"
        assert {len(job.result().tokens) for job in jobs} == {5}
        n_stored = running.status().generated_tokens
        assert running.cancel()
        result = running.result(timeout=10)
        assert result.finish_reason == "cancelled"
        assert len(result.tokens) > n_stored, "the tokens that Redis refused are in the result"
        with pytest.raises(RedisFull):
            client.submit(PROMPT)
    redis.config_set("maxmemory", 0)
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
