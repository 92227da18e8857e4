"""When connections are cut or become silent under load, no token is lost and every job stays with its worker."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.tcp_proxy import Proxy

from llamaq.common.protocol.job_events import Started
from llamaq.common.redis.connect import SOCKET_TIMEOUT_S
from llamaq.producer.streaming.pubsub_connection import PING_S
from llamaq.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment, Read

PROMPT = "Once upon a time"
N_JOBS = 24
LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
N_CUTS = 25


@pytest.fixture
def proxy(environment: Environment) -> Iterator[Proxy]:
    """A proxy between Redis and the commands and clients of this environment."""
    with Proxy(environment.redis_url) as opened:
        environment.redis_url = opened.url
        yield opened
        environment.end_commands()


def test_no_token_is_lost_when_connections_are_cut_repeatedly(
    environment: Environment, proxy: Proxy, read: Read
) -> None:
    environment.start_worker("--n-parallel", "8", LLAMAQ_LEASE_S="4")
    pause = random.Random(7)
    with environment.client() as client:
        endless = read(client.submit(PROMPT, max_tokens=1900, ignore_eos=True))
        readers = [read(client.submit(PROMPT, seed=number, **LONG)) for number in range(N_JOBS)]
        whole = client.submit(PROMPT, stream=False, **LONG)
        endless.await_tokens(5)
        for _ in range(N_CUTS):
            time.sleep(pause.uniform(0.02, 0.3))  # a random moment
            proxy.cut()
        assert endless.is_alive(), "the jobs ended before the last cut"
        endless.job.cancel()
        endless.finish()
        environment.events_of(endless.job)
        for reader in readers:
            assert len(reader.finish().tokens) == LONG["max_tokens"]
            environment.events_of(reader.job)
        assert len(whole.result().tokens) == LONG["max_tokens"]
        assert proxy.n_cut > 2 * N_CUTS
        assert client.queue_depth().running == 0


def test_silent_connections_are_noticed_and_replaced(environment: Environment, proxy: Proxy, read: Read) -> None:
    environment.start_worker("--n-parallel", "4", LLAMAQ_LEASE_S=str(WorkerSettings.model_fields["lease_s"].default))
    with environment.client() as client:
        readers = [read(client.submit(PROMPT, max_tokens=1200, ignore_eos=True)) for _ in range(3)]
        for reader in readers:
            reader.await_tokens(20)
        assert proxy.silence() >= 3, "fewer connections than those of the worker and two of the client"
        silent_s = time.monotonic()
        n_before = [reader.n_tokens for reader in readers]
        for reader, n in zip(readers, n_before, strict=True):
            reader.await_tokens(n + 1)
        assert time.monotonic() - silent_s < SOCKET_TIMEOUT_S + 3 * PING_S
        for reader in readers:
            reader.job.cancel()
            reader.finish()
            # The job started only once, because its worker noticed the silence before the lease expired.
            assert sum(isinstance(event, Started) for event in environment.events_of(reader.job)) == 1


def test_a_client_continues_after_redis_was_unreachable_for_a_while(
    environment: Environment, proxy: Proxy, read: Read
) -> None:
    environment.start_worker(LINGER_TOKENS="100")
    with environment.client() as client:
        reader = read(client.submit(PROMPT, cancel_on_disconnect=True, **LONG))
        reader.await_tokens(10)
        proxy.refuse()
        proxy.cut()
        time.sleep(2)  # longer than the lease
        proxy.accept()
        environment.let_jobs_finish()
        assert len(reader.finish().tokens) == LONG["max_tokens"]
        assert client.generate(PROMPT, max_tokens=3).tokens
