"""A job has crashed its workers again and again: clients do not repeat its request, which would crash others."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.gateway.test_cancelled_jobs import ENDPOINTS
from tests.gateway.test_disconnects import gateway

from llamaq.common.errors import ErrorCode


@pytest.mark.parametrize(("code", "should_retry"), [(ErrorCode.POISON, "false"), (ErrorCode.INTERNAL, None)])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_request_whose_job_has_crashed_its_workers_is_not_repeated(
    redis_url: str, queue: str, path: str, code: ErrorCode, should_retry: str | None
) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(path, json={**ENDPOINTS[path], "model": queue}))
        await (await worker.start_next()).fail(code)
        answer = await asking
    assert (answer.status_code, answer.headers.get("x-should-retry")) == (502, should_retry), answer.text
