"""An operator cancels the job of a request: the answer says so, and does not look complete."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tests.gateway.test_disconnects import MESSAGES, gateway, until

from llamaq.gateway.responses.record import ID_PREFIX
from llamaq.producer import AsyncClient, FinishReason

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


async def until_one_waits(client: AsyncClient) -> None:
    async def waits() -> bool:
        return (await client.queue_depth()).waiting == 1

    await until(waits)


async def purge_when_waiting(client: AsyncClient) -> None:
    await until_one_waits(client)
    await client.purge()


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_request_whose_waiting_job_is_purged_is_answered_with_an_error(
    redis_url: str, queue: str, path: str
) -> None:
    async with gateway(redis_url, queue) as (url, _, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(path, json={**ENDPOINTS[path], "model": queue}))
        await purge_when_waiting(client)
        answer = await asking
    assert answer.status_code == 410, "clients repeat a request after 409, 429 and 5xx, which would undo the purge"
    assert "llamaq purge" in answer.text
    assert "cancelled" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_stream_whose_job_is_cancelled_ends_with_an_error(redis_url: str, queue: str, path: str) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(path, json={**ENDPOINTS[path], "model": queue, "stream": True}))
        attempt = await worker.start_next()
        await attempt.emit([1], "word ")
        await attempt.finish(FinishReason.CANCELLED)
        answer = await asking
    assert answer.status_code == 200
    assert "word" in answer.text
    assert "was cancelled" in answer.text
    assert "[DONE]" not in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    assert "response.incomplete" not in answer.text


@pytest.mark.parametrize("body", [{}, {"stream": True}])
async def test_a_stored_response_shows_later_that_it_was_cancelled(
    redis_url: str, queue: str, body: dict[str, bool]
) -> None:
    async with gateway(redis_url, queue) as (url, _, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        sent = {"input": "hi", "background": True, **body}
        asking = asyncio.create_task(http.post("/v1/responses", json=sent))
        await until_one_waits(client)
        (job,) = await client.jobs()
        await client.purge()
        answer = await asking
        stored = await http.get(f"/v1/responses/{ID_PREFIX}{job.job_id}")
    assert (stored.status_code, stored.json()["status"]) == (200, "cancelled")
    if body:
        assert "response.incomplete" in answer.text
