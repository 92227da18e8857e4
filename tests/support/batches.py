"""Batches of OpenAI's Batch API over HTTP: input files, a worker that answers, and results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.testing import FakeWorker

CHAT = "/v1/chat/completions"


def line(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    """Return a line of an input file."""
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}


def jsonl(*lines: object) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()


def echo(request: JobRequest) -> list[str]:
    return ["re: ", str(request.messages[-1].content if request.messages else request.prompt)]


@asynccontextmanager
async def answering(redis_url: str, queue: str, prefix: str = "llamaq") -> AsyncIterator[None]:
    """Answer the jobs of a queue within this context."""
    async with FakeWorker(redis_url, queue, key_prefix=prefix) as worker:
        task = asyncio.create_task(worker.serve(echo))
        try:
            yield
        finally:
            await cancel_tasks(task)


async def upload(http: httpx.AsyncClient, content: bytes, **fields: str) -> httpx.Response:
    return await http.post(
        "/v1/files", files={"file": ("../../etc/in.jsonl", content)}, data={"purpose": "batch", **fields}
    )


async def begin(http: httpx.AsyncClient, content: bytes, **fields: Any) -> dict[str, Any]:
    """Upload a file and begin its batch."""
    file_id = (await upload(http, content)).json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
    begun = await http.post("/v1/batches", json=body)
    assert begun.status_code == 200, begun.text
    batch: dict[str, Any] = begun.json()
    return batch


async def end_of(http: httpx.AsyncClient, batch: dict[str, Any], *statuses: str) -> dict[str, Any]:
    """Wait until a batch has one of the statuses, and return it."""
    awaited = statuses or ("completed", "failed", "expired", "cancelled")
    while True:
        now: dict[str, Any] = (await http.get(f"/v1/batches/{batch['id']}")).json()
        if now["status"] in awaited:
            return now
        await asyncio.sleep(0.02)


async def lines_of(http: httpx.AsyncClient, file_id: str) -> list[Any]:
    answer = await http.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200
    return [json.loads(each) for each in answer.text.splitlines()]
