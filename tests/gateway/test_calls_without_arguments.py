"""The arguments of a call are JSON, also if the model writes none."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.gateway.test_disconnects import gateway

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.queue_and_worker_state import CacheSnapshot, Worker
from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker

ANSWER = "[TOOL_CALLS]stop[ARGS]"
CHAT: Any = [{"role": "user", "content": "hi"}]
FUNCTION: Any = {"name": "stop", "parameters": {"type": "object"}}
REQUESTS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": CHAT, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"messages": CHAT, "max_tokens": 9, "tools": [{"name": "stop", "input_schema": {}}]},
}
ENDS = pytest.mark.parametrize(("reason", "expected"), [(FinishReason.STOP, "{}"), (FinishReason.LENGTH, "")])


async def announce_mistral(worker: FakeWorker) -> None:
    """Store a heartbeat of a worker whose model writes calls as Mistral's models do."""
    card = (await worker.announce()).model_copy(update={"chat_template": "[TOOL_CALLS]"})
    cache = CacheSnapshot(n_cells=512, reserved_cells=0)
    beat = Worker(card=card, cache=cache, heartbeat_ms=card.started_ms, tick_age_ms=0)
    await worker.redis.hset(worker.keys.worker(worker.name), "worker", codec.encode_model(beat))


def arguments_in(value: Any) -> str:
    """Return the joined deltas of arguments in the events of a stream, or the arguments in a whole answer."""
    found = ""
    if isinstance(value, dict):
        own = [value.get(name) for name in ("arguments", "partial_json")]
        own += [value["delta"]] if value.get("type") == "response.function_call_arguments.delta" else []
        found = "".join(each for each in own if isinstance(each, str))
        value = list(value.values())
    return found + ("".join(map(arguments_in, value)) if isinstance(value, list) else "")


@ENDS
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_call_without_arguments_gets_an_empty_object(
    redis_url: str, queue: str, path: str, streams: bool, reason: FinishReason, expected: str
) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        await announce_mistral(worker)
        asking = asyncio.create_task(http.post(path, json={**REQUESTS[path], "model": queue, "stream": streams}))
        attempt = await worker.start_next()
        await attempt.finish(reason, text=ANSWER, tokens=[1])
        answer = await asking
    assert answer.status_code == 200, answer.text
    if streams:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [event for event in map(json.loads, events) if not path.endswith("responses") or "delta" in event]
        assert '"stop"' in answer.text
        assert arguments_in(deltas) == expected
    elif path == "/v1/messages":
        (block,) = answer.json()["content"]
        assert (block["name"], block["input"]) == ("stop", {})
    else:
        assert arguments_in(answer.json()) == expected


@ENDS
async def test_the_python_client_reads_a_call_without_arguments(
    redis_url: str, queue: str, reason: FinishReason, expected: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await announce_mistral(worker)
        answers = await client.chat_answers(CHAT, tools=REQUESTS["/v1/chat/completions"]["tools"])
        asking = asyncio.create_task(client.chat(CHAT, **answers.options))
        await (await worker.start_next()).finish(reason, text=ANSWER, tokens=[1])
        (call,) = answers.read(await asking).tool_calls
    assert (call.function.name, call.function.arguments) == ("stop", expected)
