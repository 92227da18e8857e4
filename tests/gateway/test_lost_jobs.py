"""Redis loses the job of a request: the client is told to repeat the request."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.gateway.test_cancelled_jobs import ENDPOINTS
from tests.gateway.test_disconnects import CHAT, STREAMED, gateway, until

from llamaq.producer.streaming import poll_schedule


async def test_requests_whose_jobs_are_lost_may_be_repeated(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_schedule, "WAITING_SILENCE_S", 0.5)
    async with gateway(redis_url, queue) as (url, _, client), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = [
            asyncio.create_task(http.post(path, json={**body, "model": queue})) for path, body in ENDPOINTS.items()
        ]
        streaming = asyncio.create_task(http.post(CHAT, json={**STREAMED, "model": queue, "n": 2}))

        async def all_wait() -> bool:
            return (await client.queue_depth()).waiting == len(asking) + 2

        await until(all_wait)
        for job in await client.jobs():
            await client.redis.delete(client.keys.of_job(job.job_id).job)
        answers = await asyncio.gather(*asking)
        stream = (await streaming).text
        unknown = await http.get("/v1/responses/resp_unknown")
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert "Redis has lost the job" in answer.json()["error"]["message"]
        assert "Retry-After" in answer.headers
    assert [answer.json()["error"].get("code") for answer in answers].count("job_lost") == 4
    assert '"code":"job_lost"' in stream
    assert "[DONE]" not in stream
    assert unknown.status_code == 404
