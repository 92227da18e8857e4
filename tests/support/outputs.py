"""Reads the outputs of a scheduler, and tells which tokens its fake engine must have generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamaq.worker.core.job import Job
from llamaq.worker.core.outputs import JobEnded, NewToken, Output
from llamaq.worker.testing import next_letter
from llamaq.worker.testing.fake_engine import NextToken


def tokens_of(outputs: Iterable[Output], job: Job | str | None = None) -> list[int]:
    """Return the new tokens of a job, or of the job with this id; without `job`, those of all jobs."""
    return [each.token for each in outputs if isinstance(each, NewToken) and job in (None, each.job, each.job.id)]


def end_of(outputs: Iterable[Output], job: Job | None = None) -> JobEnded:
    """Return the end of a job; without `job`, the only end."""
    (end,) = (each for each in outputs if isinstance(each, JobEnded) and job in (None, each.job))
    return end


def first_tokens(prompt: Sequence[int], n_tokens: int, next_token: NextToken = next_letter) -> list[int]:
    """Return the first tokens that the fake engine generates after a prompt."""
    history = list(prompt)
    for _ in range(n_tokens):
        history.append(next_token(history))
    return history[len(prompt) :]
