"""The jobs that ended last."""

from __future__ import annotations

import pytest
from tests.support.fake_redis import replace_redis

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.queue_and_worker_state import RecentJob
from llamaq.producer import AsyncClient
from llamaq.producer.queries.queue_snapshots import read_recent


async def test_recent_jobs_have_the_time_of_their_end_and_damaged_entries_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with AsyncClient(replace_redis(monkeypatch)) as client:
        stream = client.keys.stats(client.queue)
        for number in range(3):
            job = RecentJob(job_id=str(number), error_code="internal", stats=JobStats())
            await client.redis.xadd(stream, {"job": codec.encode_model(job)}, id=f"{1000 + number}-0")
        await client.redis.xadd(stream, {"job": b"no job"})
        await client.redis.xadd(stream, {"other": b"x"})
        recent = (await client.stats()).recent
        assert [(job.job_id, job.ended_ms) for job in recent] == [("2", 1002), ("1", 1001), ("0", 1000)]
        later = await read_recent(client.connection, client.queue, since_ms=1001)
        assert [job.job_id for job in later] == ["2", "1"]
