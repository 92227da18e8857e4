"""Makes OpenTelemetry spans for the jobs that end in this worker, if OpenTelemetry is installed.

Each job has a span with the children `llamaq.queue`, `llamaq.prefill` and `llamaq.decode`. They are made when the job
has ended, with the times that were measured. The parent of the job's span is the span of the submit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from llamaq.common.protocol.keys import JobId
from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.worker.engine_loop.telemetry import EndedJob

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer


def span_hooks(card: WorkerCard) -> list[Callable[[EndedJob], None]]:
    """Return the hook that makes the spans while OpenTelemetry has an SDK. Empty: OpenTelemetry is not installed."""
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.trace") is None:
        return []
    from opentelemetry import trace

    spans = JobSpans(trace.get_tracer("llamaq.worker", card.version), card)

    def make_spans(ended: EndedJob) -> None:
        # Without an SDK, nothing records the spans. A user's hook may set it up later.
        if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            spans(ended)

    return [make_spans]


class JobSpans:
    """A hook that makes the spans of each ended job. They have no prompt and no output."""

    def __init__(self, tracer: Tracer, card: WorkerCard) -> None:
        """Create the hook.

        Args:
            tracer: Makes the spans. Without an SDK of OpenTelemetry, it makes none.
            card: The properties of the worker.
        """
        self._tracer = tracer
        self._card = card

    def __call__(self, ended: EndedJob) -> None:
        """Make the spans of an ended job."""
        times = ended.timeline
        if times.submitted_at is None:
            return
        from opentelemetry.trace import SpanKind, set_span_in_context

        ended_s = max(times.submitted_at, times.ended_at or 0.0)
        span = self._tracer.start_span(
            "llamaq.job",
            context=_parent(ended.traceparent),
            kind=SpanKind.CONSUMER,
            attributes=self._attributes(ended),
            start_time=_nanoseconds(times.submitted_at),
        )
        if ended.error_code is not None:
            _set_error(span, ended.error_code)
        inside = set_span_in_context(span)
        self._add_child("llamaq.queue", inside, times.submitted_at, times.first_slot_at or ended_s)
        if times.slot_at is not None:
            self._add_child("llamaq.prefill", inside, times.slot_at, times.first_token_at or ended_s)
        if times.first_token_at is not None:
            self._add_child("llamaq.decode", inside, times.first_token_at, ended_s)
        span.end(_nanoseconds(ended_s))

    def _attributes(self, ended: EndedJob) -> dict[str, str | int | float]:
        stats = ended.stats
        values = {
            "llamaq.job.id": ended.job_id,
            "llamaq.queue": JobId.parse(ended.job_id).queue,
            "llamaq.worker": stats.worker or self._card.worker,
            "llamaq.slot": stats.slot,
            "llamaq.cached_tokens": stats.prefix_cache_tokens,
            "llamaq.cache_tier": stats.prefix_cache_tier,
            "llamaq.finish_reason": ended.finish_reason,
            "llamaq.error_code": ended.error_code,
            "llamaq.preempted_ms": stats.preempted_ms,
            "gen_ai.request.model": self._card.model,
            "gen_ai.usage.input_tokens": stats.prompt_tokens,
            "gen_ai.usage.output_tokens": stats.generated_tokens,
        }
        return {name: value for name, value in values.items() if value is not None}

    def _add_child(self, name: str, context: Context, start_s: float, end_s: float) -> None:
        span = self._tracer.start_span(name, context=context, start_time=_nanoseconds(start_s))
        span.end(_nanoseconds(max(start_s, end_s)))

    def __repr__(self) -> str:
        return f"<JobSpans {self._card.worker}>"


def _parent(traceparent: str | None) -> Context | None:
    """Return the context of a span in another process. None: the job's span begins a trace of its own."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if traceparent is None:
        return Context()  # without it, the current span of this thread would be the parent
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, context=Context())


def _set_error(span: Span, code: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, code))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
