"""`/v1/responses` with a fake worker: what a client gets when its job fails, or is cancelled."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.gateway.test_disconnects import gateway

from llamaq.common.errors import ErrorCode
from llamaq.gateway.http.event_stream import FIRST_PING_S

RESPONSES = "/v1/responses"


@pytest.mark.parametrize("code", [ErrorCode.PROMPT_TOO_LONG, ErrorCode.INVALID_GRAMMAR])
async def test_an_error_before_the_first_text_of_a_stream_sets_the_status(
    redis_url: str, queue: str, code: ErrorCode
) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url) as http:
        asking = asyncio.create_task(http.post(RESPONSES, json={"input": "hi", "stream": True}))
        attempt = await worker.start_next()
        await attempt.fail(code)
        answer = await asking
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize("is_background", [False, True])
async def test_the_first_events_of_a_stream_do_not_wait_for_the_job(
    redis_url: str, queue: str, is_background: bool
) -> None:
    body = {"input": "hi", "stream": True, "background": is_background}
    loop = asyncio.get_running_loop()
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url) as http:
        start_s = loop.time()
        async with http.stream("POST", RESPONSES, json=body) as answer:
            lines = answer.aiter_lines()
            while "response.created" not in await anext(lines):  # the job waits: a client has the id nevertheless
                pass
            waited_s = loop.time() - start_s
            attempt = await worker.start_next()
            await attempt.fail(ErrorCode.PROMPT_TOO_LONG)
            rest = [line async for line in lines]
    assert (waited_s < FIRST_PING_S) == is_background
    assert any("response.failed" in line for line in rest)
