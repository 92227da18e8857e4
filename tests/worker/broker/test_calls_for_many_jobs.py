"""A worker claims the jobs for its free slots in one call of Redis, and ends jobs in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.worker.broker.test_suspects import until, working

from llamaq.common.protocol.script_calls import MAX_JOBS_IN_CALL, Scripts
from llamaq.producer import AsyncClient


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The number of jobs in each call of `claim_jobs` and `finish_jobs`."""
    sizes: dict[str, list[int]] = {"claim_jobs": [], "finish_jobs": []}

    def count(name: str, place: int) -> Callable[..., Any]:
        original = getattr(Scripts, name)

        async def counted(*args: Any, **kwargs: Any) -> Any:
            sizes[name].append(len(args[place]))
            return await original(*args, **kwargs)

        return counted

    monkeypatch.setattr(Scripts, "claim_jobs", count("claim_jobs", 1))
    monkeypatch.setattr(Scripts, "finish_jobs", count("finish_jobs", 2))
    return sizes


async def test_jobs_are_claimed_and_ended_together(redis_url: str, queue: str, sizes: dict[str, list[int]]) -> None:
    async with AsyncClient(redis_url, queue) as client:
        n_jobs = MAX_JOBS_IN_CALL + 10
        jobs = await client.submit_many([{"prompt": "hello"} for _ in range(n_jobs)])
        async with working(redis_url, queue, capacity=n_jobs) as worker:
            await until(lambda: len(worker.admitted) == n_jobs)
            assert sizes["claim_jobs"] == [n_jobs, 10], "a call takes at most MAX_JOBS_IN_CALL of them"
            for job in jobs:
                worker.end(job)
            for job in jobs:
                assert (await job.result(timeout=10)).finish_reason == "stop"
    assert sum(sizes["finish_jobs"]) == n_jobs
    assert max(sizes["finish_jobs"]) <= MAX_JOBS_IN_CALL
    assert len(sizes["finish_jobs"]) < n_jobs / 4
