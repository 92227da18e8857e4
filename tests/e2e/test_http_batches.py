"""Files and batches of `llamaq serve` in front of a real worker, with the openai package as the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.http_server import serving_http
from tests.support.lazy_import import lazy_import

from llamaq.producer import Client

if TYPE_CHECKING:
    import openai
    from tests.e2e.conftest import ServedQueue
else:
    openai = lazy_import("openai")


@asynccontextmanager
async def connected(demo: ServedQueue) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving_http(demo.url, demo.queue) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_a_batch_from_the_upload_to_its_answers(demo: ServedQueue, client: Client) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    expected = client.chat(hello, max_tokens=6, temperature=0)
    body = {"model": demo.queue, "messages": hello, "max_tokens": 6, "temperature": 0}
    rows: list[dict[str, Any]] = [
        {"custom_id": f"row {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(3)
    ]
    rows.append(
        {**rows[0], "custom_id": "long", "body": {**body, "messages": [{"role": "user", "content": "x" * 9999}]}}
    )
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    async with connected(demo) as api:
        file = await api.files.create(
            file=("in.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        batch = await api.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"job": "nightly"},
            output_expires_after={"anchor": "created_at", "seconds": 7200},
        )
        begun = batch.status
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.05)
            batch = await api.batches.retrieve(batch.id)
        assert (begun, batch.status) == ("validating", "completed")
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        answers = [json.loads(line) for line in (await api.files.content(batch.output_file_id)).text.splitlines()]
        (error,) = [json.loads(line) for line in (await api.files.content(batch.error_file_id)).text.splitlines()]
        output = await api.files.retrieve(batch.output_file_id)
        listed = [each.id async for each in api.batches.list(limit=1)]
        files = [each.id async for each in api.files.list(purpose="batch")]
        assert (await api.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await api.files.retrieve(file.id)
        with pytest.raises(openai.BadRequestError, match="completed"):
            await api.batches.cancel(batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 3, 1)
    assert batch.usage is not None
    assert batch.usage.input_tokens == 3 * expected.stats.prompt_tokens
    assert batch.usage.output_tokens == 18
    assert batch.metadata == {"job": "nightly"}
    assert {each["custom_id"] for each in answers} == {"row 0", "row 1", "row 2"}
    completions = [openai.types.chat.ChatCompletion.model_validate(each["response"]["body"]) for each in answers]
    assert {each.choices[0].message.content for each in completions} == {expected.text}
    assert (error["custom_id"], error["response"]["status_code"], error["error"]["code"]) == (
        "long",
        400,
        "prompt_too_long",
    )
    assert output.expires_at is not None
    assert output.expires_at - output.created_at == 7200
    assert batch.id in listed
    assert file.id in files
