"""Files and batches of `llamaq serve` in front of a real worker, with the openai package as the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.http_clients import openai_client
from tests.support.http_server import serving_http
from tests.support.lazy_import import lazy_import

from llamaq.producer import Client

if TYPE_CHECKING:
    import openai
    from tests.e2e.conftest import ServedQueue
else:
    openai = lazy_import("openai")


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
    async with openai_client(demo) as api:
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
        oldest_first = [each.id async for each in api.batches.list(limit=1, extra_query={"order": "asc"})]
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
        "context_length_exceeded",
    )
    assert output.expires_at is not None
    assert output.expires_at - output.created_at == 7200
    assert batch.id in listed
    assert oldest_first == list(reversed(listed))
    assert file.id in files


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
FORCED = {"lark": 'start: "7"'}
"""The model has random weights, so a grammar decides what it answers."""
LINES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none"},
        {"n": 3, "logprobs": True, "top_logprobs": 2, **FORCED},
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a"]}}},
            "reasoning_effort": "none",
        },
        {"tools": [WEATHER], "lark": f"start: {json.dumps(CALL)}"},
        {"prompt_logprobs": 2, **FORCED},
        {"tools": "hammer"},
        {"n": 1000},
    ],
    "/v1/completions": [
        {"prompt": ["one", [5, 6, 7]], "n": 2, "echo": True, **FORCED},
        {"prompt": ["one", [5, 6, 7]], "n": 2, "logprobs": 1, **FORCED},
        {"prompt": [5, "two", 6], **FORCED},
        {"prompt": ["one", [5, 6, 7]], "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs": 1},
        {"prompt": {}},
    ],
    "/v1/responses": [
        {"input": "Hello", "include": ["message.output_text.logprobs"], "store": False, **FORCED},
        {
            "input": "Hello",
            "tools": [{"type": "function", **WEATHER["function"]}],
            "store": False,
            "lark": f"start: {json.dumps(CALL)}",
        },
        {"input": "And now?", "store": False, **FORCED},
        {"input": "Hello", "previous_response_id": "resp_unknown"},
    ],
}
OWN_NAMES = ("id", "call_id", "created", "created_at", "timings")
"""Fields in which two answers to one request differ."""
OWN_NUMBERS = ("logprob", "token_logprobs", "top_logprobs", "prompt_logprobs", "usage")
"""Fields whose values depend on the other jobs of the worker."""


def comparable(value: Any, name: str = "") -> Any:
    """Return an answer without what differs between two answers to one request."""
    if isinstance(value, dict) and name not in OWN_NUMBERS:
        kept = value.items() if "token" in value else [each for each in value.items() if each[0] not in OWN_NAMES]
        return {each_name: comparable(each, each_name) for each_name, each in kept}
    if isinstance(value, list):
        return [comparable(each, name) for each in value]
    return type(value) if name in OWN_NUMBERS else value


async def run_batch(
    http: httpx.AsyncClient, path: str, bodies: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a batch that has ended, and the lines of its files by their `custom_id`."""
    rows = [{"custom_id": str(number), "url": path, "body": body} for number, body in enumerate(bodies)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = (await http.post("/v1/files", files={"file": ("x", content)}, data={"purpose": "batch"})).json()
    batch = (await http.post("/v1/batches", json={"input_file_id": file["id"], "endpoint": path})).json()
    while batch["status"] not in ("completed", "failed"):
        await asyncio.sleep(0.02)
        batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    ids = [batch[name] for name in ("output_file_id", "error_file_id") if batch[name]]
    files = [await http.get(f"/v1/files/{file_id}/content") for file_id in ids]
    return batch, {line["custom_id"]: line for each in files for line in map(json.loads, each.text.splitlines())}


@pytest.mark.parametrize("path", LINES)
async def test_the_answers_of_a_batch_are_those_of_its_endpoint(caller: ServedQueue, path: str) -> None:
    common: dict[str, Any] = {"model": caller.queue, "temperature": 0, "seed": 1}
    common |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 60}
    if path == "/v1/chat/completions":
        common["messages"] = [{"role": "user", "content": "Hello"}]
    bodies = [common | each for each in LINES[path]]
    async with serving_http(caller.url, caller.queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        if path == "/v1/responses":
            earlier = (await http.post(path, json=common | {"input": "First"})).json()
            bodies[2]["previous_response_id"] = earlier["id"]
        direct = [await http.post(path, json=body) for body in bodies]
        batch, lines = await run_batch(http, path, bodies)
    for number, answer in enumerate(direct):
        response = lines[str(number)]["response"]
        if answer.is_success:
            assert comparable(answer.json()) == comparable(response["body"]), number
        else:
            assert response["status_code"] == answer.status_code
            assert answer.json()["error"]["message"] in lines[str(number)]["error"]["message"]
    bodies = [line["response"]["body"] for line in lines.values() if line["error"] is None]
    assert batch["request_counts"]["completed"] == len(bodies) == sum(answer.is_success for answer in direct)
    assert batch["usage"]["total_tokens"] == sum(body["usage"]["total_tokens"] for body in bodies)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_the_usage_of_a_batch_has_the_tokens_of_reasoning(caller: ServedQueue, path: str) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_budget": 7, "max_tokens": 20}
    asked = {"input": "Hello", "messages": [{"role": "user", "content": "Hello"}], "n": 2}
    async with serving_http(caller.url, caller.queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        batch, lines = await run_batch(http, path, [thinking | asked] * 2)
    usages = [line["response"]["body"]["usage"] for line in lines.values()]
    details = [usage.get("output_tokens_details") or usage["completion_tokens_details"] for usage in usages]
    n_reasoning = sum(each["reasoning_tokens"] for each in details)
    assert n_reasoning >= 2 * 7
    assert batch["usage"]["output_tokens_details"] == {"reasoning_tokens": n_reasoning}
