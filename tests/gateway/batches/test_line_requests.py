"""Lines of a batch that mean the same as requests at their endpoint: references, and the codes of errors."""

from __future__ import annotations

import asyncio
import threading
from array import array
from typing import Any

import httpx
import pytest
from tests.gateway.test_disconnects import gateway
from tests.support.batches import begin, end_of, jsonl, lines_of
from tests.support.http_server import serving_http
from tests.support.worker_cards import announce_card

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.protocol.embedding_task import Embedding, JobKind
from llamaq.common.protocol.job_request import JobRequest
from llamaq.gateway import embedding_and_rerank_format
from llamaq.producer.testing import FakeWorker, fake_embedding

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
    assert (error["custom_id"], error["response"]["status_code"]) == ("1", 404)
    assert "input.0: there is no stored item" in error["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_x"},
        {"input": [{"type": "item_reference", "id": "msg_q.0.1_0"}]},
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": "some"},
        {"max_output_tokens": 0},
    ],
)
async def test_a_refused_line_has_the_status_and_the_code_of_the_endpoint(
    redis_url: str, queue: str, fields: dict[str, Any]
) -> None:
    body = {"input": "hi", **fields}
    row = {"custom_id": "a", "url": RESPONSES, "body": body}
    async with gateway(redis_url, queue) as (url, _, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        live = await http.post(RESPONSES, json=body)
        done = await end_of(http, await begin(http, jsonl(row), endpoint=RESPONSES))
        (error,) = await lines_of(http, done["error_file_id"])
    expected, found = live.json()["error"], error["response"]["body"]["error"]
    assert error["response"]["status_code"] == live.status_code
    assert [found[name] for name in ("code", "param")] == [expected[name] for name in ("code", "param")]
    assert found["message"] == f"line 1: {expected['message']}"
    assert error["error"]["code"] == (expected["code"] or "invalid_request")


async def test_a_prompt_that_is_too_long_has_the_code_and_the_type_of_the_endpoint(redis_url: str, queue: str) -> None:
    row = {"custom_id": "a", "url": RESPONSES, "body": {"input": "hi"}}
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        begun = await begin(http, jsonl(row), endpoint=RESPONSES)
        await (await worker.start_next()).fail("prompt_too_long", "9 tokens are too many")
        done = await end_of(http, begun)
        (error,) = await lines_of(http, done["error_file_id"])
    assert (error["error"]["code"], error["response"]["body"]["error"]["code"]) == ("context_length_exceeded",) * 2
    assert error["response"]["body"]["error"]["type"] == "exceed_context_size_error"


async def test_a_line_for_embeddings_in_the_form_of_llama_server_fails_alone(redis_url: str, queue: str) -> None:
    path = "/v1/embeddings"
    bodies = [{"content": "hello"}, {"input": "hello"}]
    rows = [{"custom_id": str(at), "url": path, "body": each} for at, each in enumerate(bodies)]
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await announce_card(worker, kind=JobKind.EMBEDDING)
        begun = await begin(http, jsonl(*rows), endpoint=path)
        await (await worker.start_next()).finish(embeddings=[fake_embedding("hello")])
        done = await end_of(http, begun)
        (answer,) = await lines_of(http, done["output_file_id"])
        (error,) = await lines_of(http, done["error_file_id"])
    assert (done["status"], answer["custom_id"], error["custom_id"]) == ("completed", "1", "0")
    assert error["response"]["status_code"] == 400
    assert "input: a text" in error["error"]["message"]


async def test_many_embeddings_of_a_line_are_encoded_on_a_thread_and_counted(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    encode = embedding_and_rerank_format._encode_vector

    def encode_here(row: bytes) -> bytes:
        threads.append(threading.get_ident())
        return encode(row)

    monkeypatch.setattr(embedding_and_rerank_format, "_encode_vector", encode_here)
    path, embedding = "/v1/embeddings", Embedding(3, 1, array("f", range(600)).tobytes())
    row = {"custom_id": '"body": null', "url": path, "body": {"input": ["hello"] * 32}}
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await announce_card(worker, kind=JobKind.EMBEDDING)
        begun = await begin(http, jsonl(row), endpoint=path)
        await (await worker.start_next()).finish(embeddings=[embedding] * 32)
        done = await end_of(http, begun)
        (answer,) = await lines_of(http, done["output_file_id"])
    assert answer["custom_id"] == '"body": null'
    assert [each["embedding"] for each in answer["response"]["body"]["data"]] == [list(range(600))] * 32
    assert (done["usage"]["input_tokens"], done["usage"]["output_tokens"]) == (96, 0)
    assert len(threads) == 32
    assert threading.get_ident() not in threads


async def test_a_line_gets_the_default_length_as_at_the_endpoint(redis_url: str, queue: str) -> None:
    bodies = [{"prompt": "a", "min_tokens": 500}, {"prompt": "b", "n_predict": -1}, {"prompt": "c", "max_tokens": 3}]
    path = "/v1/completions"
    rows = [{"custom_id": each["prompt"], "url": path, "body": each} for each in bodies]
    given: dict[str | None, int | None] = {}

    def answer(request: JobRequest) -> list[str]:
        given[request.prompt] = request.max_tokens
        return ["ok"]

    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue, default_max_tokens=40) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        serving = asyncio.create_task(worker.serve(answer))
        done = await end_of(http, await begin(http, jsonl(*rows), endpoint=path))
        await cancel_tasks(serving)
    assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert given == {"a": 500, "b": 40, "c": 3}
