"""Answers to requests of Anthropic's API whose text a fake worker chooses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.gateway.test_disconnects import gateway

BODY: dict[str, Any] = {
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
}


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (r'{"a": "\ud83d\ude00"}', {"a": "\U0001f600"}),
        (r'{"a": "\ud83d"}', {}),
        ('{"a": NaN}', {}),
        ('{"a": [1, {"b": -1e999}]}', {}),
        ('{"a": [1, {"b": -1e99}]}', {"a": [1, {"b": -1e99}]}),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", {}),
    ],
    ids=["pair", "half a pair", "NaN", "infinity", "large", "deep"],
)
async def test_the_input_of_a_tool_is_always_json(
    redis_url: str, queue: str, arguments: str, expected: dict[str, Any]
) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post("/v1/messages", json={**BODY, "model": queue}))
        attempt = await worker.start_next()
        await attempt.finish(text=f'{{"name": "f", "arguments": {arguments}}}', tokens=[1])
        answer = await asking
    assert answer.status_code == 200, answer.text
    (block,) = json.loads(answer.text, parse_constant=refuse)["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", expected)


async def test_all_events_of_a_block_have_its_index(redis_url: str, queue: str) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post("/v1/messages", json={**BODY, "model": queue, "stream": True}))
        attempt = await worker.start_next()
        await attempt.finish(text='{"name": "f", "arguments": {"a": 1}}', tokens=[1])
        answer = await asking
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    of_block = [(event["type"], event["index"]) for event in events if event["type"].startswith("content_block")]
    assert list(dict.fromkeys(of_block)) == [(f"content_block_{kind}", 0) for kind in ("start", "delta", "stop")]
