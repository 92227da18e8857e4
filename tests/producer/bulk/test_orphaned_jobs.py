"""The jobs of earlier processes are found and cancelled, and what they leave in Redis is deleted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.redis_servers import ClusterServers

from llamaq.common.protocol.keys import JobId
from llamaq.producer import AsyncClient
from llamaq.producer.bulk import orphaned_job_cancellation
from llamaq.producer.bulk.input_row import row_key
from llamaq.producer.bulk.orphaned_job_cancellation import cancel_rows_in_flight
from llamaq.producer.bulk.result_deletion import delete_results
from llamaq.producer.job_window.window_job import replacement_key


async def test_the_rows_that_were_read_last_are_looked_up_first(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most rows in flight are among them. A process that has read more rows since its last report leaves a gap."""
    looked_up: list[int] = []
    find = orphaned_job_cancellation._find_jobs_of_rows

    async def find_rows(first: Any, run_id: str, rows: Sequence[int]) -> dict[str, tuple[str, bool]]:
        looked_up.append(rows[0])
        return await find(first, run_id, rows)

    monkeypatch.setattr(orphaned_job_cancellation, "_find_jobs_of_rows", find_rows)
    async with AsyncClient(redis_url, queue) as client:
        for row in (1, 3500, 3600, 7000):
            await client.submit("x", idempotency_key=row_key("run", row, 0))
        assert await cancel_rows_in_flight(client, "run", last_row=3500, n_rows=7000) == 4
    assert looked_up == [4001, 3001, 2001, 1001, 1, 5001, 6001, 7001]


async def test_the_jobs_of_all_partitions_are_found_without_the_setting(redis_url: str, queue: str) -> None:
    """The shell of `llamaq bulk cancel` may lack `LLAMAQ_PARTITIONS`."""
    async with AsyncClient(redis_url, queue, partitions=4) as client, AsyncClient(redis_url, queue) as other:
        await client.redis.hset(client.keys.config(queue, 0), "partitions", "4")
        for row in range(1, 21):
            await client.submit("x", idempotency_key=row_key("run", row, 0))
        assert await cancel_rows_in_flight(other, "run", last_row=20) == 20
        assert (await client.queue_depth()).waiting == 0


async def test_the_idempotency_record_of_a_replaced_row_is_deleted(redis_url: str, queue: str) -> None:
    """It is stored in the partition of its own key. The job that replaces it has another key."""
    keys = [row_key("run", row, 0) for row in range(1, 9)]
    async with AsyncClient(redis_url, queue, partitions=4) as client:
        replaced = [await client.submit("x", idempotency_key=key) for key in keys]
        jobs = [await client.submit("x", idempotency_key=replacement_key(key, 1)) for key in keys]
        pairs = zip(replaced, jobs, strict=True)
        assert any(JobId.parse(old.id).partition != JobId.parse(new.id).partition for old, new in pairs)
        await delete_results(client.connection, [(key, job.id, False) for key, job in zip(keys, jobs, strict=True)])
        again = [await client.submit("x", idempotency_key=key) for key in keys]
        assert not {job.id for job in replaced} & {job.id for job in again}
        assert not await client.redis.exists(*(client.keys.of_job(job.id).job for job in jobs))


@pytest.mark.starts_processes
async def test_rows_are_found_and_records_deleted_on_all_nodes_of_a_cluster(tmp_path: Path, queue: str) -> None:
    keys = [row_key("run", row, 0) for row in range(1, 31)]
    with ClusterServers(tmp_path) as servers:
        async with AsyncClient(servers.url, queue, partitions=6) as client, AsyncClient(servers.url, queue) as other:
            await client.redis.hset(client.keys.config(queue, 0), "partitions", "6")
            replaced = {(await client.submit("x", idempotency_key=key)).id for key in keys}
            jobs = [await client.submit("x", idempotency_key=replacement_key(key, 1)) for key in keys]
            await delete_results(client.connection, [(key, job.id, False) for key, job in zip(keys, jobs, strict=True)])
            again = {(await client.submit("x", idempotency_key=key)).id for key in keys}
            assert not replaced & again
            assert await cancel_rows_in_flight(other, "run", last_row=30) == 30
