"""Batches of jobs: they are validated together, submitted in one round trip, and refused one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.redis_servers import ClusterServers

from llamaq.common.redis import connect as connect_module
from llamaq.producer import (
    AsyncClient,
    BatchIncomplete,
    Client,
    IdempotencyConflict,
    InvalidRequest,
    JobArguments,
    QueueFull,
    RedisFull,
)
from llamaq.producer import submit_many as batch_module
from llamaq.producer.testing import FakeWorker
from llamaq.worker.local.embedded_redis import EmbeddedRedis

N_JOBS = 1000


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The first bytes of each write to a connection with Redis, without the PING of a connection that was not used.

    The client reads all replies before the next write.
    """
    written: list[bytes] = []
    send = connect_module._send

    async def count(connection: Any, command: Any) -> None:
        data = command if isinstance(command, bytes) else b"".join(command)
        if b"PING" not in data[:20]:
            written.append(data[:80])
        await send(connection, command)

    monkeypatch.setattr(connect_module, "_send", count)
    return written


def numbered(count: int) -> list[JobArguments]:
    return [{"prompt": f"job {number}", "priority": "bulk"} for number in range(count)]


async def test_a_job_that_is_no_dict_is_refused_by_its_index(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        with pytest.raises(InvalidRequest, match=r"jobs\[1\]: a dict"):
            await client.submit_many([{"prompt": "x"}, "a prompt"])  # type: ignore[list-item]


async def test_a_thousand_jobs_take_one_round_trip_and_their_handles_are_in_order(
    redis_url: str, queue: str, round_trips: list[bytes]
) -> None:
    async with AsyncClient(redis_url, queue, partitions=4) as client:
        await client.submit_many(numbered(1))
        round_trips.clear()
        jobs = await client.submit_many(numbered(N_JOBS))
        assert len(round_trips) == 1
        assert len({job.id for job in jobs}) == N_JOBS
        assert all(job.is_new for job in jobs)
        assert (await client.queue_depth()).waiting == N_JOBS + 1
        for place in (0, 1, 500, N_JOBS - 1):
            request = await client.redis.hget(client.keys.of_job(jobs[place].id).job, "request")
            assert f"job {place}".encode() in (request or b"")
        assert await client.submit_many([]) == ()


@pytest.mark.starts_processes
async def test_a_server_that_does_not_know_the_script_gets_it_once(queue: str, round_trips: list[bytes]) -> None:
    with EmbeddedRedis() as server:
        async with AsyncClient(server.url, queue) as client:
            await client.redis.ping()
            round_trips.clear()
            assert len(await client.submit_many(numbered(N_JOBS))) == N_JOBS
            assert len(round_trips) == 2, "the batch with the script's hash, and again with its text in the first call"
            assert (await client.queue_depth()).waiting == N_JOBS


async def test_a_large_batch_is_sent_in_parts(
    redis_url: str, queue: str, round_trips: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "MAX_BYTES_AT_ONCE", 10_000)
    async with AsyncClient(redis_url, queue) as client:
        await client.submit("x")
        round_trips.clear()
        await client.submit_many([{"prompt": "x" * 4000} for _ in range(5)])
        assert len(round_trips) == 3
        assert (await client.queue_depth()).waiting == 6


async def test_one_invalid_job_keeps_the_whole_batch_from_being_submitted(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, max_request_bytes=2000) as client:
        for wrong, message in (
            ({"prompt": "x", "max_tokens": -2}, r"^jobs\[7\]: max_tokens"),
            (
                {"prompt": "x", "max_token": 1},
                r"^jobs\[7\]: max_token: there is no such option; did you mean max_tokens",
            ),
            ({"prompt": "x" * 3000}, r"^jobs\[7\]: .*max_request_bytes"),
            ({}, r"^jobs\[7\]: "),
        ):
            jobs: Any = [*numbered(7), wrong, *numbered(7)]
            with pytest.raises(InvalidRequest, match=message):
                await client.submit_many(jobs)
        assert (await client.queue_depth()).waiting == 0


async def test_refused_jobs_are_named_and_the_others_are_submitted(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        await client.redis.hset(client.keys.config(queue, 0), "max_queue", "4")
        earlier = await client.submit("earlier", idempotency_key="key")
        jobs = numbered(6)
        jobs[1] = {"prompt": "other", "idempotency_key": "key"}
        jobs[2] = {"prompt": "earlier", "idempotency_key": "key"}
        with pytest.raises(
            BatchIncomplete, match=r"^2 of 6 jobs were not submitted .*jobs\[1\]: .*idempotency"
        ) as caught:
            await client.submit_many(jobs)
        errors, ids = caught.value.errors, caught.value.job_ids
        assert isinstance(errors[1], IdempotencyConflict)
        assert isinstance(errors[5], QueueFull)
        assert [place for place, job_id in enumerate(ids) if job_id is None] == [1, 5]
        assert [place for place, error in enumerate(errors) if error is not None] == [1, 5]
        assert ids[2] == earlier.id
        assert {job.job_id for job in await client.jobs()} == {job_id for job_id in ids if job_id is not None}


@pytest.mark.starts_processes
async def test_each_job_that_a_full_redis_refuses_has_an_error(queue: str) -> None:
    with EmbeddedRedis() as server:
        async with AsyncClient(server.url, queue) as client:
            await client.submit("loads the script")
            await client.redis.config_set("maxmemory", 1)
            with pytest.raises(BatchIncomplete, match="3 of 3 jobs") as caught:
                await client.submit_many(numbered(3))
            assert all(isinstance(error, RedisFull) for error in caught.value.errors)


def test_the_blocking_client_returns_handles_whose_jobs_end(redis_url: str, queue: str) -> None:
    with Client(redis_url, queue) as client:
        jobs = client.submit_many([{"tokens": [1, 2]}, {"messages": [{"role": "user", "content": "hi"}]}])
        assert [job.status().state.value for job in jobs] == ["queued", "queued"]
        assert [job.cancel() for job in jobs] == [True, True]


@pytest.mark.starts_processes
async def test_a_batch_reaches_every_node_of_a_cluster(tmp_path: Path, queue: str) -> None:
    with ClusterServers(tmp_path) as servers:
        async with AsyncClient(servers.url, queue, partitions=6) as client, FakeWorker(servers.url, queue):
            assert len(await client.submit_many(numbered(200))) == 200
            assert (await client.queue_depth()).waiting == 200
