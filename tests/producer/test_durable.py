"""Submits that wait until replicas of Redis have the job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot
from tests.support.ports import HOST, reserve_ports
from tests.support.redis_servers import IN_MEMORY, ClusterServers, Server, wait_until
from typer.testing import CliRunner

from llamaq.cli.error_report import exit_code_of
from llamaq.cli.main import build_app
from llamaq.producer import AsyncClient, InvalidRequest, NotDurable
from llamaq.producer import durability as durability_module

pytestmark = pytest.mark.starts_processes

PATIENCE_S = 60.0
"""How long a submit waits for a replica that confirms it, also on a busy machine."""
LONG_REPLIES = "?socket_timeout=90"
"""A parameter of a URL: a connection waits longer for a reply than a submit waits for replicas."""


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    """A master and its replica."""
    master, replica = (Server(tmp_path, port, IN_MEMORY) for port in reserve_ports(2))
    try:
        master.start()
        replica.start("--replicaof", HOST, str(master.port))
        with replica.client() as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica is in sync")
        yield master, replica
    finally:
        replica.kill()
        master.kill()


def url_of(server: Server) -> str:
    return f"redis://{HOST}:{server.port}/0{LONG_REPLIES}"


async def test_a_durable_submit_returns_when_the_replica_has_the_job(
    servers: tuple[Server, Server], queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "REPLICA_WAIT_S", PATIENCE_S)
    master, replica = servers
    async with AsyncClient(url_of(master), queue, partitions=3) as client:
        job = await client.submit("x", durable=1)
        jobs = await client.submit_many([{"prompt": "x"} for _ in range(20)], durable=1)
        with replica.client() as of_replica:
            for one in (job, *jobs):
                assert of_replica.hget(client.keys.of_job(one.id).job, "status") == b"queued"
        with pytest.raises(InvalidRequest, match="durable: -1"):
            await client.submit("x", durable=-1)


async def test_without_enough_replicas_the_error_names_the_job_which_is_submitted(
    servers: tuple[Server, Server], queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "REPLICA_WAIT_S", 0.2)
    master, replica = servers
    replica.signal(signal.SIGSTOP)
    try:
        async with AsyncClient(url_of(master), queue) as client:
            with pytest.raises(NotDurable, match="was submitted, but 0 of 1 replicas") as caught:
                await client.submit("x", durable=1)
            error = caught.value
            assert (error.confirmed, error.durable, error.job_ids) == (0, 1, (error.job_id,))
            assert [job.job_id for job in await client.jobs()] == [error.job_id]
            assert error.job_id in str(error)
            with pytest.raises(NotDurable, match="and 2 more were submitted") as batch:
                await client.submit_many([{"prompt": "x"} for _ in range(3)], durable=1)
            assert len(batch.value.job_ids) == 3
            assert (await client.queue_depth()).waiting == 4
            # An idempotent submit writes nothing, and its job is not confirmed either.
            await client.submit("y", idempotency_key="key")
            with pytest.raises(NotDurable):
                await client.submit("y", idempotency_key="key", durable=1)
    finally:
        replica.signal(signal.SIGCONT)


def test_the_command_line_waits_for_replicas(
    servers: tuple[Server, Server], queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["submit", "x", "--redis-url", url_of(servers[0]), "--queue", queue, "--durable"]
    monkeypatch.setattr(durability_module, "REPLICA_WAIT_S", PATIENCE_S)
    accepted = CliRunner().invoke(build_app("submit"), [*options, "1"])
    monkeypatch.setattr(durability_module, "REPLICA_WAIT_S", 0.2)
    unconfirmed = CliRunner().invoke(build_app("submit"), [*options, "2"])
    assert (accepted.exit_code, accepted.stdout.partition(".")[0]) == (0, queue)
    assert isinstance(unconfirmed.exception, NotDurable)
    assert exit_code_of(unconfirmed.exception) == 3


async def test_each_master_of_a_cluster_waits_for_its_replica(
    tmp_path: Path, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "REPLICA_WAIT_S", PATIENCE_S)
    with ClusterServers(tmp_path, n_replicas=1) as cluster:
        async with AsyncClient(f"{cluster.url}{LONG_REPLIES}", queue, partitions=6) as client:
            assert len(await client.submit_many([{"prompt": "x"} for _ in range(60)], durable=1)) == 60


async def test_the_node_that_has_the_job_confirms_it_although_its_hash_slot_is_moving(
    tmp_path: Path, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of the partition are still on the old node, whose replicas do not have the job."""
    monkeypatch.setattr(durability_module, "REPLICA_WAIT_S", 0.5)
    with ClusterServers(tmp_path, n_replicas=1) as cluster:
        async with AsyncClient(f"{cluster.url}{LONG_REPLIES}", queue) as client:
            job = await client.submit("x")
            config, job_key = client.keys.config(queue, 0), client.keys.of_job(job.id).job
            await client.connection.redis.hset(config, "partitions", "1")
            slot = key_slot(config.encode())
            new = next(server for server in cluster.masters if server is not cluster.master_of(slot))
            (replica,) = cluster.replicas[new]
            replica.signal(signal.SIGSTOP)
            with cluster.slot_moves(slot, new, job_key):
                confirming = asyncio.create_task(durability_module.confirm(client.connection, [job.id], 1))
                await asyncio.wait([confirming], timeout=1)
            with pytest.raises(NotDurable, match="0 of 1 replicas"):
                await confirming
            replica.signal(signal.SIGCONT)
            monkeypatch.setattr(durability_module, "REPLICA_WAIT_S", PATIENCE_S)
            await durability_module.confirm(client.connection, [job.id], 1)
