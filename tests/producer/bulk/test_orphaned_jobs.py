"""The jobs of a killed process are found and cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from llamaq.producer import AsyncClient
from llamaq.producer.bulk import orphaned_job_cancellation
from llamaq.producer.bulk.input_row import row_key
from llamaq.producer.bulk.orphaned_job_cancellation import cancel_rows_in_flight


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
