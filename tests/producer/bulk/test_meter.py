"""The progress of a bulk run: rates, and the time that remains."""

from __future__ import annotations

from llamaq.producer.bulk import BulkProgress, BulkState
from llamaq.producer.bulk.meter import Meter


def test_the_time_that_remains_is_estimated_after_a_second() -> None:
    now_s = 0.0
    meter = Meter("r", lambda: now_s, rows_total=100, rows_before=10)

    def report() -> BulkProgress:
        return meter.report(BulkState.RUNNING, rows_failed=0)

    assert report().eta_s is None
    for _ in range(10):
        meter.count([])
    now_s = 0.002
    assert report().eta_s is None  # the first answers come together
    now_s = 5.0
    assert report().eta_s == 40.0
    for _ in range(80):
        meter.count([])
    assert report().eta_s == 0.0
