"""The spans of ended jobs: their times, their parent and their attributes."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from tests.support.worker_cards import make_card

from llamaq.common.protocol.job_outcome import CacheTier, FinishReason, JobStats
from llamaq.common.protocol.queue_and_worker_state import TickStats
from llamaq.worker.broker.wall_clock_timeline import timeline_of
from llamaq.worker.core.job_times import JobTimes
from llamaq.worker.engine_loop.telemetry import EndedJob, JobTimeline, Telemetry
from llamaq.worker.process.job_spans import JobSpans, span_hooks

CARD = make_card()
STATS = JobStats(
    prompt_tokens=30, generated_tokens=5, worker="w1", slot=2, prefix_cache_tokens=20, prefix_cache_tier=CacheTier.HOST
)
TIMELINE = JobTimeline(submitted_at=100.0, first_slot_at=101.0, slot_at=101.0, first_token_at=101.5, ended_at=103.0)
ENDED = EndedJob(f"q.0.{secrets.token_hex(16)}", STATS, FinishReason.STOP, None, {"secret": "metadata"}, TIMELINE)


def spans_of(ended: EndedJob) -> dict[str, ReadableSpan]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(job_hooks=[JobSpans(provider.get_tracer("test"), CARD)])
    telemetry.record_job(ended)
    return {span.name: span for span in exporter.get_finished_spans()}


def interval(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_job_has_spans_of_queue_prefill_and_decode_with_the_measured_times() -> None:
    spans = spans_of(ENDED)
    assert {name: interval(span) for name, span in spans.items()} == {
        "llamaq.job": (100.0, 103.0),
        "llamaq.queue": (100.0, 101.0),
        "llamaq.prefill": (101.0, 101.5),
        "llamaq.decode": (101.5, 103.0),
    }
    job = spans["llamaq.job"]
    assert job.kind is SpanKind.CONSUMER
    assert job.parent is None
    for name in ("llamaq.queue", "llamaq.prefill", "llamaq.decode"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == job.context.span_id


def test_the_attributes_have_the_measurements_and_no_metadata() -> None:
    attributes = dict(spans_of(ENDED)["llamaq.job"].attributes or {})
    assert attributes == {
        "llamaq.job.id": ENDED.job_id,
        "llamaq.queue": "q",
        "llamaq.worker": "w1",
        "llamaq.slot": 2,
        "llamaq.cached_tokens": 20,
        "llamaq.cache_tier": "host",
        "llamaq.finish_reason": "stop",
        "gen_ai.request.model": "m.gguf",
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 5,
    }


def test_the_span_of_the_submit_is_the_parent() -> None:
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    spans = spans_of(replace(ENDED, traceparent=f"00-{trace_id}-{span_id}-01"))
    parent = spans["llamaq.job"].parent
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}", parent.is_remote) == (trace_id, span_id, True)
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {trace_id}


def test_a_job_of_a_submit_that_is_not_sampled_has_no_span() -> None:
    assert spans_of(replace(ENDED, traceparent=f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00")) == {}


def test_a_failed_job_that_never_had_a_slot_has_the_spans_of_its_wait_and_its_error() -> None:
    timeline = JobTimeline(submitted_at=100.0, ended_at=107.0)
    failed = EndedJob(ENDED.job_id, JobStats(), None, "prompt_too_long", {}, timeline)
    spans = spans_of(failed)
    assert {name: interval(span) for name, span in spans.items()} == {
        "llamaq.job": (100.0, 107.0),
        "llamaq.queue": (100.0, 107.0),
    }
    assert not spans["llamaq.job"].status.is_ok
    assert spans["llamaq.job"].status.description == "prompt_too_long"


def test_a_job_whose_times_are_not_known_has_no_span() -> None:
    assert spans_of(EndedJob(ENDED.job_id, STATS, None, "damaged", {})) == {}


def test_job_hooks_get_no_ticks() -> None:
    got: list[object] = []
    tick = TickStats(batch_size=1, decode_tokens=1, prefill_tokens=0, active_slots=1, queue_depth=0, eval_ms=1.0)
    Telemetry(job_hooks=[got.append]).record_tick(tick)
    assert got == []


def test_the_timeline_has_the_times_of_the_job_on_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaq.worker.broker.wall_clock_timeline.time.time", lambda: 1000.0)
    monkeypatch.setattr("llamaq.worker.broker.wall_clock_timeline.time.monotonic", lambda: 50.0)
    times = JobTimes(submitted_s=40.0, queue_ms=2000.0, first_slot_s=43.0)
    stats = JobStats(ttft_ms=500.0, duration_ms=4000.0)
    assert timeline_of(times, stats) == JobTimeline(990.0, 992.0, 993.0, 993.5, 997.0)
    assert timeline_of(JobTimes(submitted_s=40.0), None) == JobTimeline(submitted_at=990.0, ended_at=1000.0)


def test_without_opentelemetry_there_is_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def find_spec(name: str) -> Any:
        found.append(name)

    assert len(span_hooks(CARD)) == 1
    monkeypatch.setattr("llamaq.worker.process.job_spans.importlib.util.find_spec", find_spec)
    assert span_hooks(CARD) == []
    assert found


def test_the_hook_of_jobs_gets_each_ended_job() -> None:
    jobs: list[EndedJob] = []
    Telemetry(job_hooks=[jobs.append]).record_job(ENDED)
    assert jobs == [ENDED]


def test_no_span_is_made_until_an_sdk_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EndedJob] = []
    monkeypatch.setattr(JobSpans, "__call__", lambda _self, ended: made.append(ended))
    (hook,) = span_hooks(CARD)
    hook(ENDED)
    assert made == []
    monkeypatch.setattr(trace, "get_tracer_provider", TracerProvider)
    hook(ENDED)
    assert made == [ENDED]
