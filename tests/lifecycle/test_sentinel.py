"""After a failover, by Sentinel or by hand, streams continue on the new master without a gap or a repeat."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.support.ports import HOST, reserve_ports
from tests.support.redis_servers import IN_MEMORY, SERVICE, SentinelServers, Server, wait_until
from tests.support.tcp_proxy import Proxy

from llamaq.common.protocol.job_events import Started
from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.keys import Keys
from llamaq.common.redis.sentinel import MAX_ANSWER_AGE_S
from llamaq.producer import Job, JobNotFound

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Environment, Read

PROMPTS = ("Once upon a time", "Once upon a time there was a girl named Mia.", "One day a little fox")
LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "temperature": 0}
MAX_TOKENS_PLANNED = 600
"""Number of tokens of a job that lasts longer than a planned failover and its detection."""
LEASE_S = "6"
"""Longer than a failover, so that no lease expires during one."""


@pytest.fixture
def sentinel_servers(folder: Path, environment: Environment) -> Iterator[SentinelServers]:
    with SentinelServers(folder) as servers:
        environment.redis_url = servers.url
        yield servers
        environment.end_commands()  # while Redis still runs


def attempts_of(environment: Environment, job: Job) -> int:
    return sum(isinstance(event, Started) for event in environment.events_of(job))


def test_streams_continue_after_the_master_died(
    environment: Environment, sentinel_servers: SentinelServers, read: Read
) -> None:
    worker = environment.start_worker("--n-parallel", "6", LLAMAQ_LEASE_S=LEASE_S, LINGER_TOKENS="100")
    with environment.client() as client:
        readers = [read(client.submit(prompt, **LONG)) for prompt in PROMPTS]
        whole = client.submit(PROMPTS[0], stream=False, **LONG)
        for reader in readers:
            reader.await_tokens(20)
        sentinel_servers.master.kill()
        meanwhile = read(
            client.submit(PROMPTS[0], max_tokens=10, ignore_eos=True)
        )  # the submit waits for the new master
        environment.let_jobs_finish()
        for reader in readers:
            assert len(reader.finish().tokens) == LONG["max_tokens"]
            assert attempts_of(environment, reader.job) == 1
        assert len(whole.result().tokens) == LONG["max_tokens"]
        assert len(meanwhile.finish().tokens) == 10
        assert [one.card.worker for one in client.workers()] == [worker.worker_id]
        assert client.queue_depth().running == 0


def test_streams_continue_after_a_planned_failover(
    environment: Environment, sentinel_servers: SentinelServers, read: Read
) -> None:
    environment.start_worker("--n-parallel", "6", LLAMAQ_LEASE_S=LEASE_S, LINGER_TOKENS="500")
    with environment.client() as client:
        readers = [read(client.submit(prompt, max_tokens=MAX_TOKENS_PLANNED, ignore_eos=True)) for prompt in PROMPTS]
        for reader in readers:
            reader.await_tokens(20)
        old = sentinel_servers.master
        with sentinel_servers.sentinels[0].client() as sentinel:
            execute: Any = sentinel.execute_command
            execute("SENTINEL FAILOVER", SERVICE)
        wait_until(lambda: sentinel_servers.master is not old, "the replica is the master")
        wait_until(lambda: sentinel_servers.agree_on(sentinel_servers.master), "all Sentinels name the new master")
        time.sleep(MAX_ANSWER_AGE_S)  # during this time, a write to the old master may be lost
        assert all(reader.is_alive() for reader in readers), "the jobs ended before the failover"
        environment.let_jobs_finish()
        later = read(client.submit(PROMPTS[0], max_tokens=10, ignore_eos=True))
        for reader in readers:
            assert len(reader.finish().tokens) == MAX_TOKENS_PLANNED
        later.finish()
        with sentinel_servers.master.client() as new:
            for reader in (*readers, later):
                assert new.hget(Keys().of_job(reader.job.id).job, "status") == b"finished"
                assert attempts_of(environment, reader.job) == 1


class ManualFailover:
    """A master and a replica without Sentinels. `self.address` is a proxy to the current master."""

    def __init__(self, folder: Path) -> None:
        one, other = reserve_ports(2)
        self.master, self.replica = Server(folder, one, IN_MEMORY), Server(folder, other, IN_MEMORY)
        self.address = Proxy(f"redis://{HOST}:{one}")
        self.replication = Proxy(f"redis://{HOST}:{one}")

    def __enter__(self) -> Self:
        self.master.start()
        self.address.__enter__()
        self.replication.__enter__()
        self.replica.start("--replicaof", HOST, self.replication.url.rpartition(":")[2].partition("/")[0])
        with self.replica.client() as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica is in sync")
        return self

    def __exit__(self, *_: object) -> None:
        self.address.__exit__(None, None, None)
        self.replication.__exit__(None, None, None)
        self.master.kill()
        self.replica.kill()

    def stop_replication(self) -> None:
        """Stop the replication: the replica receives no more writes."""
        self.replication.silence()

    def promote_replica(self) -> None:
        """Make the replica the master. Writes that it has not received are lost."""
        self.master.kill()
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")
        self.address.redirect_to(f"redis://{HOST}:{self.replica.port}")


@pytest.fixture
def manual_failover(folder: Path, environment: Environment) -> Iterator[ManualFailover]:
    with ManualFailover(folder) as servers:
        environment.redis_url = servers.address.url
        yield servers
        environment.end_commands()


def test_tokens_that_a_failover_lost_are_stored_again_and_no_reader_receives_them_twice(
    environment: Environment, manual_failover: ManualFailover, read: Read
) -> None:
    environment.start_worker("--n-parallel", "6", LLAMAQ_LEASE_S=LEASE_S, LINGER_TOKENS="200")
    with environment.client() as client:
        longer = LONG | {"max_tokens": 500}
        readers = [read(client.submit(prompt, **longer)) for prompt in PROMPTS]
        for reader in readers:
            reader.await_tokens(20)
        manual_failover.stop_replication()
        for reader, n_before in [(reader, reader.n_tokens) for reader in readers]:
            reader.await_tokens(n_before + 40)
        lost = client.submit(PROMPTS[0], **LONG)
        with manual_failover.replica.client() as replica:
            for reader in readers:
                stored: Any = replica.hget(Keys().of_job(reader.job.id).job, "generated")
                assert int(stored) < reader.n_tokens, "the failover will lose no token"
        manual_failover.promote_replica()
        environment.let_jobs_finish()
        for reader in readers:
            assert len(reader.finish().tokens) == longer["max_tokens"]
            assert attempts_of(environment, reader.job) == 1
        with pytest.raises(JobNotFound):  # the replica had not received the last writes
            lost.status()


def test_a_job_starts_again_on_the_new_master_if_the_failover_lost_its_start(
    environment: Environment, manual_failover: ManualFailover, read: Read
) -> None:
    environment.start_worker("--n-parallel", "1", "--inbox-window", "0", LLAMAQ_LEASE_S="2", LINGER_TOKENS="100")
    with environment.client() as client:
        first = client.submit(PROMPTS[0], **LONG)
        wait_until(lambda: first.status().state is JobState.RUNNING, "the first job runs")
        reader = read(client.submit(PROMPTS[1], **LONG))
        with manual_failover.replica.client() as replica:
            wait_until(lambda: replica.exists(Keys().of_job(reader.job.id).job), "the replica has received the submit")
        manual_failover.stop_replication()
        first.cancel()
        reader.await_tokens(30)
        manual_failover.promote_replica()
        environment.let_jobs_finish()
        assert len(reader.finish().tokens) == LONG["max_tokens"]
        assert attempts_of(environment, reader.job) == 1  # the failover lost the first `Started`
        assert first.result().finish_reason == "length"  # the failover lost the cancellation
