"""The stats of ended jobs, which a worker stores in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.queue_and_worker_state import RecentJob
from llamaq.common.protocol.script_types import MAX_JOBS_IN_CALL
from llamaq.worker.broker import stats_writer
from llamaq.worker.broker.stats_writer import StatsWriter
from llamaq.worker.engine_loop.telemetry import EndedJob, Telemetry


class SlowScripts:
    """Stores stats in a list. During each call, jobs end in the worker."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.ending: list[str] = []
        """The jobs that end during the next call."""
        self.writer: StatsWriter
        self.refuses_from = 10**9
        """Number of stored stats from which Redis refuses more."""

    async def add_stats(self, _: str, jobs: Sequence[RecentJob]) -> None:
        if len(self.stored) >= self.refuses_from:
            raise ResponseError("refused")
        self.stored += [job.job_id for job in jobs]
        while self.ending:
            end(self.writer, self.ending.pop(0))


def end(writer: StatsWriter, *job_ids: str) -> None:
    for job_id in job_ids:
        writer.record_job(EndedJob(job_id, JobStats(), FinishReason.STOP, None, {}))


def writer_of(scripts: SlowScripts) -> StatsWriter:
    """Return a writer that calls these scripts."""
    telemetry = Telemetry()
    telemetry.attach()
    scripts.writer = StatsWriter(cast(Any, scripts), "queue", telemetry)
    return scripts.writer


async def test_jobs_that_end_while_a_full_list_is_stored_are_stored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_writer, "MAX_STATS", 10)
    scripts = SlowScripts()
    writer = writer_of(scripts)
    old, new = [f"old-{number}" for number in range(10)], ["new-1", "new-2", "new-3"]
    end(writer, *old)
    scripts.ending = list(new)
    await writer.store()
    assert scripts.stored == old + new


async def test_stats_that_redis_has_stored_are_not_stored_again_after_a_refusal() -> None:
    scripts = SlowScripts()
    writer = writer_of(scripts)
    names = [f"job-{number}" for number in range(MAX_JOBS_IN_CALL + 1)]
    end(writer, *names)
    scripts.refuses_from = 1
    with pytest.raises(ResponseError):
        await writer.store()
    scripts.refuses_from = 10**9
    await writer.store()
    assert scripts.stored == names
