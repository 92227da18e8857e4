"""Reads the outputs of a scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken, Output


def tokens_of(outputs: Iterable[Output], job: Job | None = None) -> list[int]:
    """Return the new tokens of a job; without `job`, those of all jobs."""
    return [each.token for each in outputs if isinstance(each, NewToken) and job in (None, each.job)]


def end_of(outputs: Iterable[Output], job: Job | None = None) -> JobEnded:
    """Return the end of a job; without `job`, the only end."""
    (end,) = (each for each in outputs if isinstance(each, JobEnded) and job in (None, each.job))
    return end
