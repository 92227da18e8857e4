"""Timings of jobs as their subscribers see them, and the figures computed from these timings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Timeline:
    """Times at which one subscriber received the tokens of its job, in seconds of `time.perf_counter`."""

    submitted_s: float
    arrivals_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Number of tokens that came with each arrival."""
    ended_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    job_id: str | None = None
    """Id of the worker's job; None for a request to llama-server."""

    @property
    def ttft_ms(self) -> float:
        """Time from submit to the first token."""
        return (self.arrivals_s[0] - self.submitted_s) * 1000

    @property
    def gaps_ms(self) -> list[float]:
        """Times between two successive arrivals. Several tokens may come with one arrival."""
        return [float(gap) for gap in np.diff(self.arrivals_s) * 1000]

    @property
    def latency_ms(self) -> float:
        """Time from submit to the end of the job."""
        return (self.ended_s - self.submitted_s) * 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """The timings of a job, and the number of its prompt tokens that were reused from a cache."""

    timeline: Timeline
    prompt_tokens: int
    reused_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Number of prompt tokens that were computed."""
        return self.prompt_tokens - self.reused_tokens


def summarize(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the figures of jobs that ran together. The wall time is from the first submit to the last end."""
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
    """Return the percentiles 50, 95 and 99 and the maximum. All are zero if there are no values."""
    p50, p95, p99, largest = np.percentile(values or (0.0,), (50, 95, 99, 100)).round(2).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": largest}


def median_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over the rounds that have it."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for figures in rounds for name in figures):
        values = [figures[name] for figures in rounds if name in figures]
        if isinstance(values[0], dict):
            merged[name] = median_of(values)
        else:
            merged[name] = round(statistics.median(values), 4)
    return merged
