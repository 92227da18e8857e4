"""The jobs of an HTTP request belong to the span that its header `traceparent` names."""

from __future__ import annotations

import pytest
from tests.support.http_server import post_of, sending, serving_http

from llamaq.producer.testing import FakeWorker

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(("header", "expected"), [(TRACEPARENT, TRACEPARENT), ("not a span", None)])
async def test_a_header_in_the_form_of_trace_context_travels_with_the_job(
    redis_url: str, queue: str, header: str, expected: str | None
) -> None:
    async with FakeWorker(redis_url, queue) as worker, serving_http(redis_url, queue) as url:
        await worker.announce()
        async with sending(url, post_of("/v1/chat/completions", BODY, traceparent=header)) as (reader, _):
            attempt = await worker.start_next()
            await attempt.finish(text="ok", tokens=[1])
            await reader.readuntil(b"ok")
    assert attempt.request.traceparent == expected
