"""Lines of a batch that mean the same as requests at their endpoint: references, and the codes of errors."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from tests.gateway.test_disconnects import gateway
from tests.support.batches import begin, end_of, jsonl, lines_of

RESPONSES = "/v1/responses"


async def test_a_line_may_refer_to_items_of_stored_responses(redis_url: str, queue: str) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.create_task(http.post(RESPONSES, json={"input": "hi"}))
        await (await worker.start_next()).finish(text="Hello", tokens=[2])
        (said,) = (await asking).json()["output"]
        inputs: list[list[Any]] = [
            [{"type": "item_reference", "id": each}, {"role": "user", "content": "Bye"}] for each in (said["id"], "x")
        ]
        rows = [{"custom_id": str(at), "url": RESPONSES, "body": {"input": each}} for at, each in enumerate(inputs)]
        begun = await begin(http, jsonl(*rows), endpoint=RESPONSES)
        attempt = await worker.start_next()
        await attempt.finish(text="Bye", tokens=[2])
        done = await end_of(http, begun)
        (answer,) = await lines_of(http, done["output_file_id"])
        (error,) = await lines_of(http, done["error_file_id"])
    turns = [(message.role, message.content) for message in attempt.request.messages or ()]
    assert turns == [("assistant", "Hello"), ("user", "Bye")]
    assert answer["custom_id"] == "0"
    assert (error["custom_id"], error["response"]["status_code"]) == ("1", 400)
    assert "input.0: there is no stored item" in error["error"]["message"]


async def test_a_prompt_that_is_too_long_has_the_code_of_the_endpoint(redis_url: str, queue: str) -> None:
    row = {"custom_id": "a", "url": RESPONSES, "body": {"input": "hi"}}
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        begun = await begin(http, jsonl(row), endpoint=RESPONSES)
        await (await worker.start_next()).fail("prompt_too_long", "9 tokens are too many")
        done = await end_of(http, begun)
        (error,) = await lines_of(http, done["error_file_id"])
    assert (error["error"]["code"], error["response"]["body"]["error"]["code"]) == ("context_length_exceeded",) * 2
