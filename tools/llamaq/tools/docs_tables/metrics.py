"""Renders tables of metrics: their names, kinds, labels and meanings."""

from __future__ import annotations

from collections.abc import Sequence

from llamaq.common.metrics.metric_definitions import QUEUE_FAMILIES, READER_FAMILIES, WORKER_FAMILIES, Family

METRICS: dict[str, Sequence[Family]] = {
    "QueueMetrics": QUEUE_FAMILIES,
    "WorkerMetrics": WORKER_FAMILIES,
    "ReaderMetrics": READER_FAMILIES,
}


def render_metrics(families: Sequence[Family]) -> str:
    """Return the table, with a line break at its end."""
    rows = [("name", "kind", "labels", "meaning"), ("---", "---", "---", "---")]
    rows += [
        (f"`{family.name}`", family.kind, ", ".join(f"`{label}`" for label in family.labels), family.meaning)
        for family in families
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
