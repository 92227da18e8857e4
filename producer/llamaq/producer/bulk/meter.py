"""Measures the progress of a run: counts, rates, and the time that remains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.producer.bulk.run_description import BulkProgress, BulkState

RATE_S = 60.0
"""Rates are means over this time."""
ETA_AFTER_S = 1.0
"""The time that remains is estimated after this time."""


class Meter:
    """The counts of one process that executes a run."""

    def __init__(self, run_id: str, clock: Callable[[], float], *, rows_total: int, rows_before: int) -> None:
        self._run_id = run_id
        self._clock = clock
        self._start_s = clock()
        self._rows_total = rows_total
        self._rows_before = rows_before
        self._rows = 0
        self.last_row = 0
        """Highest row number that was read."""
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._samples: deque[tuple[float, int, int]] = deque([(self._start_s, 0, 0)])
        """Time, rows and generated tokens at the last reports."""

    def __repr__(self) -> str:
        return f"<Meter rows={self._rows} tokens={self._generated_tokens}>"

    def count(self, stats: Sequence[JobStats]) -> None:
        """Count a row, with the measurements of its jobs."""
        self._rows += 1
        for each in stats:
            self._prompt_tokens += each.prompt_tokens
            self._cached_tokens += each.prefix_cache_tokens
            self._generated_tokens += each.generated_tokens

    def report(
        self, state: BulkState, *, rows_failed: int, rows_in_flight: int = 0, notice: str | None = None
    ) -> BulkProgress:
        """Return the progress now."""
        now_s = self._clock()
        self._samples.append((now_s, self._rows, self._generated_tokens))
        while len(self._samples) > 2 and self._samples[1][0] < now_s - RATE_S:
            self._samples.popleft()
        then_s, rows_then, tokens_then = self._samples[0]
        passed_s = max(now_s - then_s, 1e-3)
        rows_per_s = (self._rows - rows_then) / passed_s
        rows_done = self._rows_before + self._rows
        n_open = self._rows_total - rows_done
        eta_s = None
        if not n_open:
            eta_s = 0.0
        elif rows_per_s > 0 and passed_s >= ETA_AFTER_S:
            eta_s = round(n_open / rows_per_s, 1)
        return BulkProgress(
            run_id=self._run_id,
            state=state,
            rows_total=self._rows_total,
            rows_done=rows_done,
            rows_failed=rows_failed,
            rows_before=self._rows_before,
            rows_in_flight=rows_in_flight,
            last_row=self.last_row,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            elapsed_s=round(now_s - self._start_s, 3),
            tokens_per_s=round((self._generated_tokens - tokens_then) / passed_s, 1),
            eta_s=eta_s,
            notice=notice,
        )
