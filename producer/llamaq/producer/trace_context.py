"""The span of OpenTelemetry in which a job is submitted."""

from __future__ import annotations

import sys


def current_traceparent() -> str | None:
    """Return the current span in the form of W3C Trace Context. None: there is no span.

    OpenTelemetry is not imported here, because an application that has not imported it has no span.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
