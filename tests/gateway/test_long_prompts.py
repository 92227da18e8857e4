"""A prompt that is too long has the error that the clients of each API look for."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tests.support.http_server import serving_http

from llamaq.common.protocol.text_commands import TextReply
from llamaq.gateway.http import event_stream
from llamaq.producer.queries import text_commands
from llamaq.producer.testing import FakeWorker

MESSAGES = [{"role": "user", "content": "hi"}]
TOKENS = tuple(range(4000))


async def too_long(
    worker: FakeWorker, http: httpx.AsyncClient, path: str, body: dict[str, Any], *, has_begun: bool = False
) -> str:
    """Return the response to a request whose job fails, before or after its stream has begun with a comment."""
    request = http.build_request("POST", path, json=body)
    sending = asyncio.create_task(http.send(request, stream=True))
    attempt = await worker.start_next()
    if has_begun:
        await sending
    await attempt.fail("prompt_too_long", "36034 characters are too large")
    response = await sending
    assert response.status_code == (200 if has_begun else 400)
    return (await response.aread()).decode()


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, '"code":"context_length_exceeded"'),
        ("/v1/completions", {"prompt": list(TOKENS)}, '"code":"context_length_exceeded"'),
        ("/completion", {"prompt": list(TOKENS)}, '"code":"prompt_too_long"'),
        (
            "/v1/messages",
            {"messages": MESSAGES, "model": "default", "max_tokens": 5},
            '"message":"prompt is too long: 4000 tokens > 512 maximum"',
        ),
    ],
)
async def test_the_error_of_a_prompt_that_is_too_long_is_that_of_the_api(
    redis_url: str,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    expected: str,
    *,
    has_begun: bool,
) -> None:
    async def ask(*_: object, **__: object) -> TextReply:
        return TextReply(tokens=TOKENS)

    monkeypatch.setattr(text_commands, "ask", ask)
    # The failure is not late on a busy machine either.
    monkeypatch.setattr(event_stream, "FIRST_PING_S", 0.05 if has_begun else 30.0)
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        await worker.announce()
        body = {**body, "stream": has_begun} | ({"model": queue} if "model" in body else {})
        text = await too_long(worker, http, path, body, has_begun=has_begun)
    assert expected in text
    if path != "/v1/messages":
        assert '"type":"exceed_context_size_error"' in text
        assert '"n_prompt_tokens":4000' in text


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_has_the_code_of_openai_and_the_lengths(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool
) -> None:
    async def ask(*_: object, **__: object) -> TextReply:
        return TextReply(tokens=TOKENS)

    monkeypatch.setattr(text_commands, "ask", ask)
    monkeypatch.setattr(event_stream, "FIRST_PING_S", 30.0)  # the failure is not late on a busy machine either
    async with (
        FakeWorker(redis_url, queue) as worker,
        serving_http(redis_url, queue) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        await worker.announce()
        text = await too_long(worker, http, "/v1/responses", {"input": "hi", "stream": is_streamed})
    assert '"code":"context_length_exceeded"' in text
    assert '"n_prompt_tokens":4000,"n_ctx":512' in text
