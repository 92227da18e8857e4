"""How long the draft model takes: for a step of several drafts, and for a missing token of a history."""

from __future__ import annotations

import statistics
from collections import deque

from llamaq.worker.core.draft_plan import DraftWork

N_TICKS = 5
"""A predicted time is the median of the times of this number of newest ticks."""
OLD_AFTER = 256
"""A measured time is old after this many ticks."""


class DraftModelTimes:
    """Predicts the times of the draft model from those of earlier ticks.

    A step takes longer with more drafts, on a CPU nearly in proportion. So each number of drafts has its own time.
    """

    def __init__(self) -> None:
        self._n_ticks = 0
        self._steps: dict[int, deque[float]] = {}
        """Maps a number of drafts to the newest times of a step."""
        self._measured: dict[int, int] = {}
        """Maps a number of drafts to the tick of its newest time."""
        self._missing: deque[float] = deque(maxlen=N_TICKS)
        self.missing_token_s: float | None = None
        """The seconds of a missing token, computed before the first step. None: not known."""

    def record(self, work: DraftWork) -> None:
        """Record what the draft model has computed for a tick. To be called for every tick."""
        self._n_ticks += 1
        if work.n_steps:
            n_drafts = max(1, round(work.n_step_drafts / work.n_steps))
            self._steps.setdefault(n_drafts, deque(maxlen=N_TICKS)).append(work.steps_s / work.n_steps)
            self._measured[n_drafts] = self._n_ticks
        if work.n_before_steps:
            self._missing.append(work.before_steps_s / work.n_before_steps)
            self.missing_token_s = statistics.median(self._missing)

    def step_s(self, n_drafts: int) -> float | None:
        """Return the seconds of a step with this number of drafts, at least 1. None: not known.

        A time between two measured numbers is interpolated. Beyond the largest one, it is in proportion to the number.
        """
        if n_drafts in self._steps:
            return statistics.median(self._steps[n_drafts])
        fewer = max((n for n in self._steps if n < n_drafts), default=None)
        more = min((n for n in self._steps if n > n_drafts), default=None)
        if fewer is None:
            return None if more is None else statistics.median(self._steps[more])
        fewer_s = statistics.median(self._steps[fewer])
        if more is None:
            return fewer_s * n_drafts / fewer
        more_s = statistics.median(self._steps[more])
        return fewer_s + (more_s - fewer_s) * (n_drafts - fewer) / (more - fewer)

    def is_new(self, n_drafts: int) -> bool:
        """Return whether the time of a step with this number of drafts was measured in the last ticks."""
        measured = self._measured.get(n_drafts)
        return measured is not None and self._n_ticks - measured < OLD_AFTER

    def __repr__(self) -> str:
        steps = ", ".join(f"{n}: {statistics.median(times) * 1000:.2f} ms" for n, times in sorted(self._steps.items()))
        return f"<DraftModelTimes steps of drafts {steps}; {(self.missing_token_s or 0) * 1000:.3f} ms a missing token>"
