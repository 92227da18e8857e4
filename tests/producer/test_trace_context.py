"""The span in which a job is submitted travels with the job."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span
from tests.support.fake_redis import replace_redis

from llamaq.producer import AsyncClient, Client, InvalidRequest
from llamaq.producer.submission import current_traceparent
from llamaq.producer.testing import FakeWorker, serving

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
tracer = TracerProvider().get_tracer("test")


def traceparent_of(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


async def test_the_current_span_and_an_explicit_one_are_stored_with_the_job(
    monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    url = replace_redis(monkeypatch)
    async with AsyncClient(url, queue) as client, FakeWorker(url, queue) as worker:
        with tracer.start_as_current_span("request") as span:
            await client.submit("hello", idempotency_key="a")
            await client.submit("hello", traceparent=TRACEPARENT)
        await client.submit("hello")
        with tracer.start_as_current_span("a repeated request"):
            assert not (await client.submit("hello", idempotency_key="a")).is_new
        attempts = [await worker.start_next() for _ in range(3)]
    stored = [attempt.request.traceparent for attempt in attempts]
    assert stored == [traceparent_of(span), TRACEPARENT, None]


def test_the_span_of_a_thread_that_calls_the_blocking_client_is_stored(redis_url: str, queue: str) -> None:
    seen: list[str | None] = []
    with Client(redis_url, queue) as client, tracer.start_as_current_span("request") as span:

        def answer(request: object) -> list[str]:
            seen.append(getattr(request, "traceparent", None))
            return ["ok"]

        with serving(redis_url, queue, answer):
            client.generate("hello")
    assert seen == [traceparent_of(span)]


@pytest.mark.parametrize("value", ["", "00-1-2-3", TRACEPARENT.upper(), TRACEPARENT + "-x"])
async def test_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, queue: str, value: str) -> None:
    async with AsyncClient(replace_redis(monkeypatch), queue) as client:
        with pytest.raises(InvalidRequest, match="traceparent"):
            await client.submit("hello", traceparent=value)


def test_without_opentelemetry_there_is_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_traceparent() is None
    with tracer.start_as_current_span("request"):
        assert current_traceparent() is not None
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        assert current_traceparent() is None
