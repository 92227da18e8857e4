"""A Redis Cluster: the partitions of a queue are on several masters, and a master may die."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis.crc import key_slot
from tests.support.redis_servers import ClusterServers, wait_until

from llamaq.common.protocol.job_events import Started
from llamaq.common.protocol.job_outcome import JobState
from llamaq.common.protocol.keys import JobId, Keys
from llamaq.common.protocol.script_types import Claimant
from llamaq.common.redis.connect import connect
from llamaq.producer import AsyncClient, Client, Job
from llamaq.worker.broker import job_streams
from llamaq.worker.broker.job_streams import JobStreams
from llamaq.worker.broker.worker_queue import WorkerQueue

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment, Read

PARTITIONS = 4
PROMPT = "Once upon a time"
LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "temperature": 0}
LEASE_S = "6"
"""Longer than a failover, so that no lease expires during one."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    with ClusterServers(tmp_path_factory.mktemp("nodes")) as servers:
        yield servers


@pytest.fixture
def cluster_environment(nodes: ClusterServers, environment: Environment) -> Iterator[Environment]:
    environment.redis_url = nodes.url
    yield environment
    environment.end_commands()


@pytest.fixture
def replicated_cluster(folder: Path, environment: Environment) -> Iterator[ClusterServers]:
    with ClusterServers(folder, n_replicas=1) as servers:
        environment.redis_url = servers.url
        yield servers
        environment.end_commands()


def client_of(environment: Environment, url: str | None = None) -> Client:
    return Client(url or environment.redis_url, environment.queue, timeout_s=30, partitions=PARTITIONS, event_ttl_s=300)


def start_worker(environment: Environment, *arguments: str) -> Command:
    return environment.start_worker(*arguments, LLAMAQ_PARTITIONS=str(PARTITIONS), LLAMAQ_LEASE_S=LEASE_S)


def partition_of(job: Job) -> int:
    return JobId.parse(job.id).partition


def slot_of(job: Job) -> int:
    return int(key_slot(Keys().of_job(job.id).job.encode()))


def submit_to_each(client: Client, **options: Any) -> list[Job]:
    """Submit one job to every partition, and return the jobs."""
    jobs: dict[int, Job] = {}
    number = 0
    while len(jobs) < PARTITIONS:
        key = f"{secrets.token_hex(4)}-{number}"
        if JobId.new(client.queue, PARTITIONS, key).partition not in jobs:
            job = client.submit(PROMPT, idempotency_key=key, **options)
            jobs[partition_of(job)] = job
        number += 1
    return list(jobs.values())


def test_jobs_in_four_partitions_finish_and_every_query_counts_them(
    cluster_environment: Environment, read: Read
) -> None:
    with client_of(cluster_environment) as client:
        keyed = [client.submit(PROMPT, max_tokens=8, idempotency_key="one") for _ in range(2)]
        assert keyed[0].id == keyed[1].id
        with ThreadPoolExecutor(16) as pool:
            jobs = list(pool.map(lambda n: client.submit(PROMPT, max_tokens=8, seed=n, ignore_eos=True), range(49)))
        assert {partition_of(job) for job in jobs} == set(range(PARTITIONS))
        assert (client.queue_depth().waiting, client.queue_depth().running) == (50, 0)
        never = client.submit(PROMPT, max_tokens=8)
        assert never.cancel()
        assert never.result().finish_reason == "cancelled"

        worker = start_worker(cluster_environment, "--n-parallel", "8")
        with ThreadPoolExecutor(50) as pool:
            readers = list(pool.map(read, jobs))
            results = list(pool.map(lambda reader: reader.finish(), readers))
        assert [len(result.tokens) for result in results] == [8] * 49
        assert keyed[0].result().tokens
        for job in jobs:
            cluster_environment.events_of(job)
        running = read(client.submit(PROMPT, max_tokens=1000, ignore_eos=True))
        running.await_tokens(3)
        assert client.queue_depth().running == 1
        assert running.job.cancel()
        assert running.finish().finish_reason == "cancelled"
        wait_until(lambda: len(client.stats().recent) == 51, "the stats of all 51 finished jobs")
        stats = client.stats()
        assert [one.card.worker for one in stats.workers] == [worker.worker_id]
        assert (stats.depth.waiting, stats.depth.running) == (0, 0)
        assert client.tokenizer().encode(PROMPT)


def test_commands_work_with_a_cluster(cluster_environment: Environment) -> None:
    start_worker(cluster_environment)
    settings = cluster_environment.worker_variables(LLAMAQ_PARTITIONS=str(PARTITIONS))
    commands = [
        cluster_environment.start(*arguments, **settings)
        for arguments in (["generate", PROMPT, "--max-tokens", "5"], ["stats"], ["health"])
    ]
    assert [command.end() for command in commands] == [0] * len(commands), [one.output for one in commands]


def test_jobs_without_a_reader_are_cancelled_on_every_node(cluster_environment: Environment) -> None:
    start_worker(cluster_environment, "--disconnect-s", "4")

    async def close_half_of_the_streams() -> None:
        url, queue = cluster_environment.redis_url, cluster_environment.queue
        async with AsyncClient(url, queue, partitions=PARTITIONS) as client:
            jobs: dict[int, Any] = {}
            while len(jobs) < PARTITIONS:
                key = secrets.token_hex(4)
                partition = JobId.new(client.queue, PARTITIONS, key).partition
                if partition not in jobs:  # all jobs last longer than `disconnect_s`, and the first two much longer
                    n_tokens = 1900 if partition in (0, 1) else 550
                    jobs[partition] = await client.submit(
                        PROMPT, cancel_on_disconnect=True, idempotency_key=key, max_tokens=n_tokens, ignore_eos=True
                    )
            streams = {partition: job.stream() for partition, job in jobs.items()}
            for stream in streams.values():
                await anext(stream)
            for partition in (0, 1):
                await streams[partition].aclose()
            for partition in (2, 3):
                async for _ in streams[partition]:
                    pass
            reasons = [(await jobs[partition].result()).finish_reason for partition in range(PARTITIONS)]
            assert reasons == ["cancelled", "cancelled", "length", "length"]

    asyncio.run(close_half_of_the_streams())


RARE_SEARCHES_STRATEGY = """
from llamaq.worker.broker import intake
from paced import Paced

intake.SEARCH_EVERY_S = 600.0
"""
"""A strategy for a worker whose waits for new jobs last ten minutes, unless a new job ends them."""


def test_an_idle_worker_starts_a_job_of_any_partition_at_once(cluster_environment: Environment) -> None:
    (cluster_environment.folder / "rare_searches.py").write_text(RARE_SEARCHES_STRATEGY)
    cluster_environment.start_worker(
        LLAMAQ_REDIS_URL=f"{cluster_environment.redis_url}?socket_timeout=700",  # otherwise an error ends the waits
        LLAMAQ_PARTITIONS=str(PARTITIONS),
        LLAMAQ_LEASE_S=LEASE_S,
        LLAMAQ_BATCH_STRATEGY="rare_searches:Paced",
    )
    with client_of(cluster_environment) as client:
        n_started = dict.fromkeys(range(PARTITIONS), 0)
        while min(n_started.values()) < 3:
            job = client.submit(PROMPT, max_tokens=1)
            job.result()
            n_started[partition_of(job)] += 1


@pytest.mark.parametrize("is_planned", [False, True])
def test_streams_continue_when_a_replica_becomes_master(
    environment: Environment, replicated_cluster: ClusterServers, read: Read, is_planned: bool
) -> None:
    longer = LONG | {"max_tokens": 700}  # the streams take longer than `disconnect_s`
    start_worker(environment, "--n-parallel", "8", "--disconnect-s", "4.5")
    with client_of(environment) as client:
        readers = [read(job) for job in submit_to_each(client, cancel_on_disconnect=True, **longer)]
        for reader in readers:
            reader.await_tokens(20)
        slot = slot_of(readers[0].job)
        old = replicated_cluster.master_of(slot)
        if is_planned:
            with replicated_cluster.replicas[old][0].client() as replica:
                execute: Any = replica.execute_command
                execute("CLUSTER FAILOVER")
        else:
            old.kill()
            later = submit_to_each(client, max_tokens=5, ignore_eos=True)  # the submit waits for the new master
            assert [len(job.result().tokens) for job in later] == [5] * PARTITIONS
        for reader in readers:
            result = reader.finish()
            assert (result.finish_reason, len(result.tokens)) == ("length", longer["max_tokens"])
            assert sum(isinstance(event, Started) for event in environment.events_of(reader.job)) == 1
        assert replicated_cluster.master_of(slot) is not old
        assert client.queue_depth().running == 0


def test_streams_continue_while_the_keys_of_their_partition_move_there_and_back(
    cluster_environment: Environment, nodes: ClusterServers, read: Read
) -> None:
    start_worker(cluster_environment, "--n-parallel", "8")
    with client_of(cluster_environment) as client:
        readers = [read(job) for job in submit_to_each(client, **LONG | {"max_tokens": 400})]
        first = readers[0].job
        for reader in readers:
            reader.await_tokens(5)
        for moved_first in (Keys().of_job(first.id).events, Keys().of_job(first.id).job):
            slot, old = slot_of(first), nodes.master_of(slot_of(first))
            with nodes.slot_moves(slot, next(one for one in nodes.masters if one is not old), moved_first):
                pass  # the other keys move next
            assert nodes.master_of(slot) is not old
        for reader in readers:
            result = reader.finish()
            assert (result.finish_reason, len(result.tokens)) == ("length", 400)
            assert sum(isinstance(event, Started) for event in cluster_environment.events_of(reader.job)) == 1


def test_a_silent_master_without_replicas_does_not_stop_streams_of_other_masters(
    environment: Environment, folder: Path, read: Read
) -> None:
    with ClusterServers(folder) as servers:
        environment.redis_url = servers.url
        start_worker(environment, "--n-parallel", "8")
        with client_of(environment) as client:
            readers = [read(job) for job in submit_to_each(client, max_tokens=400, ignore_eos=True, temperature=0)]
            for reader in readers:
                reader.await_tokens(5)
            silent = servers.master_of(slot_of(readers[0].job))
            others = [one for one in readers if servers.master_of(slot_of(one.job)) is not silent]
            silent.signal(signal.SIGSTOP)  # from now on, `master_of` may ask this server
            try:
                assert others
                longest_gap_s = 0.0
                while any(one.is_alive() for one in others):  # the streams end while the master is silent
                    counts, seen_s = [one.n_tokens for one in others], time.monotonic()
                    wait_until(
                        lambda: (
                            [one.n_tokens for one in others] != counts  # noqa: B023
                            or not any(one.is_alive() for one in others)
                        ),
                        "further tokens",
                    )
                    longest_gap_s = max(longest_gap_s, time.monotonic() - seen_s)
                assert longest_gap_s < 15, "the streams of the other masters stood still"
                for reader in others:
                    assert len(reader.finish().tokens) == 400
            finally:
                silent.signal(signal.SIGCONT)
            for reader in readers:
                assert len(reader.finish().tokens) == 400
        environment.end_commands()


def test_a_worker_starts_while_one_master_is_away_and_serves_it_when_it_is_back(
    environment: Environment, folder: Path
) -> None:
    with ClusterServers(folder) as servers, client_of(environment, servers.url) as client:
        environment.redis_url = servers.url
        jobs = submit_to_each(client, max_tokens=5, ignore_eos=True)
        away = servers.master_of(slot_of(jobs[0]))
        lost = [job for job in jobs if servers.master_of(slot_of(job)) is away]
        away.signal(signal.SIGSTOP)
        try:
            start_worker(environment)
            for job in jobs:
                if job not in lost:
                    assert len(job.result().tokens) == 5
        finally:
            away.signal(signal.SIGCONT)
        for job in lost:
            assert len(job.result().tokens) == 5
        environment.end_commands()


async def test_a_read_claims_at_most_the_requested_number_of_jobs_by_priority_over_all_partitions(
    nodes: ClusterServers, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_streams, "READ_TIMEOUT_S", 30.0)  # a partition that is late on a busy machine is skipped
    redis, keys = connect(f"{nodes.url}?socket_timeout=700", name="test"), Keys()
    streams = JobStreams(WorkerQueue(redis, keys, queue, PARTITIONS), Claimant("w1", 60_000))
    await streams.open()
    async with AsyncClient(nodes.url, queue, partitions=PARTITIONS) as client:
        await asyncio.gather(*(client.submit(PROMPT, priority="bulk" if n % 4 else "interactive") for n in range(60)))
        n_left = {False: 45, True: 15}
        while n_left[True]:  # interactive jobs of every partition come before bulk jobs
            entries = await streams.read(5)
            n_read = sum(len(some) for _, some in entries)
            n_interactive = sum(len(some) for stream, some in entries if stream.endswith("interactive"))
            assert n_read == 5
            assert n_interactive == min(5, n_left[True])
            n_left = {False: n_left[False] - 5 + n_interactive, True: n_left[True] - n_interactive}
        assert sum(len(some) for _, some in await streams.read(1000)) == n_left[False]
        assert await streams.read(1) == []
        waiting = asyncio.create_task(streams.wait(600))  # the test itself may take two minutes
        await asyncio.sleep(0.1)
        job = await client.submit(PROMPT)
        await waiting
        assert sum(len(some) for _, some in await streams.read(1)) == 1
        assert (await job.status()).state is JobState.QUEUED
    await streams.close()
    await redis.aclose()
