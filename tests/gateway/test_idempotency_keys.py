"""Requests with `Idempotency-Key`: which repetitions conflict, and which get the first answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tests.support.http_server import serving_http

from llamaq.common.errors import ErrorCode
from llamaq.gateway.http import event_stream
from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def test_clients_are_told_not_to_repeat_a_request_that_conflicts_with_another(redis_url: str, queue: str) -> None:
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"Idempotency-Key": queue}) as http,
    ):
        await worker.announce()
        first, other = [
            await http.post("/v1/responses", json={"input": text, "background": True}) for text in ("a", "b")
        ]
    assert (first.status_code, other.status_code) == (200, 409)
    assert other.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in first.headers


@pytest.mark.parametrize(("length", "status"), [(0, 400), (255, 200), (256, 400)])
async def test_an_idempotency_key_has_1_to_255_characters(redis_url: str, queue: str, length: int, status: int) -> None:
    async with serving_http(redis_url, queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        body, headers = {"input": "hi", "background": True}, {"Idempotency-Key": "k" * length}
        answer = await http.post("/v1/responses", json=body, headers=headers)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("other", [{"n": 2}, {"prompt": ["a", "b"]}])
async def test_a_repeated_request_for_another_number_of_answers_conflicts_and_computes_nothing(
    redis_url: str, queue: str, other: dict[str, Any], is_streamed: bool
) -> None:
    body = {"prompt": ["a"], "stream": is_streamed}
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"Idempotency-Key": queue}) as http,
    ):
        await worker.announce()
        first = asyncio.create_task(http.post("/v1/completions", json=body))
        attempt = await worker.start_next()
        await attempt.finish(text="the answer", tokens=[1])
        repeated = await http.post("/v1/completions", json=body)
        refused = await http.post("/v1/completions", json={**body, **other})
        assert (await client.queue_depth()).waiting == 0
    assert "the answer" in repeated.text
    assert (await first).status_code == repeated.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert refused.headers["x-should-retry"] == "false"


async def test_a_repeated_request_for_another_queue_conflicts_and_computes_nothing(redis_url: str, queue: str) -> None:
    other = f"{queue}2"
    async with (
        AsyncClient(redis_url, other) as client,
        FakeWorker(redis_url, queue) as worker,
        FakeWorker(redis_url, other) as other_worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"Idempotency-Key": queue}) as http,
    ):
        await worker.announce()
        await other_worker.announce()
        first = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "model": queue}))
        await (await worker.start_next()).finish(text="the answer", tokens=[1])
        refused = await http.post("/v1/completions", json={"prompt": "a", "model": other})
        assert (await client.queue_depth()).waiting == 0
    assert (await first).status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_key_of_a_request_whose_jobs_were_all_refused_is_free(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr(event_stream, "FIRST_PING_S", 30.0)  # the failure is not late on a busy machine either
    body = {"prompt": "a", "stream": is_streamed}
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"Idempotency-Key": queue}) as http,
    ):
        await worker.announce()
        await client.drain()
        refused = await http.post("/v1/completions", json={**body, "n": 2})
        await client.resume()
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        attempt = await worker.start_next()
        await attempt.fail(ErrorCode.INVALID_GRAMMAR)
        failed = await asking
        other = await http.post("/v1/completions", json={**body, "n": 2})
    assert (refused.status_code, failed.status_code, other.status_code) == (503, 400, 409)
