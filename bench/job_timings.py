"""Timings of jobs as their subscribers see them, and the figures computed from these timings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Timeline:
    """What one subscriber saw: when its job was submitted, and when how many tokens came. Seconds of one clock."""

    submitted_s: float
    arrivals_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    job_id: str | None = None
    """To ask for its stats; None where it was no job of a worker."""

    @property
    def ttft_ms(self) -> float:
        """From submit to the first token."""
        return (self.arrivals_s[0] - self.submitted_s) * 1000

    @property
    def gaps_ms(self) -> list[float]:
        """Between arrivals; several tokens may arrive together."""
        return [float(gap) for gap in np.diff(self.arrivals_s) * 1000]

    @property
    def latency_ms(self) -> float:
        """From submit to the end."""
        return (self.ended_s - self.submitted_s) * 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """A job as its caller saw it, and how much of its prompt needed no computing."""

    timeline: Timeline
    prompt_tokens: int
    reused_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.prompt_tokens - self.reused_tokens


def summarize(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Figures of jobs that ran together: over all from the first submit to the last end."""
    n_tokens = sum(sum(one.counts) for one in timelines)
    wall_s = max(one.ended_s for one in timelines) - min(one.submitted_s for one in timelines)
    return {
        "jobs": len(timelines),
        "tokens": n_tokens,
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(n_tokens / wall_s, 1),
        "ttft_ms": spread([one.ttft_ms for one in timelines]),
        "itl_ms": spread([gap for one in timelines for gap in one.gaps_ms]),
        "tokens_per_arrival": round(n_tokens / sum(len(one.counts) for one in timelines), 2),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Percentiles and the largest; zeros where nothing was measured."""
    p50, p95, p99, largest = np.percentile(values or (0.0,), (50, 95, 99, 100)).round(2).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": largest}


def median_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over rounds that have the same ones."""
    merged: dict[str, Any] = {}
    for name, first in rounds[0].items():
        values = [figures[name] for figures in rounds]
        if isinstance(first, dict):
            merged[name] = median_of(values)
        else:
            merged[name] = round(statistics.median(values), 4)
    return merged
