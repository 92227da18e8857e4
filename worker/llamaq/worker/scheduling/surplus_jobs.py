"""Chooses the bulk jobs that a worker with too many jobs gives to other workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from llamaq.worker.core.job import BaseJob

J = TypeVar("J", bound=BaseJob)

SURPLUS_AFTER_S = 2.0
"""How long a bulk job waits in this worker before it may be withdrawn, so that another worker runs it."""


def surplus_jobs(bulk: Iterable[J], n_surplus: int, *, n_kept: int, now_s: float) -> list[J]:
    """Return the jobs to withdraw, at most `n_surplus`, the last one first.

    Each withdrawal costs a new attempt. Therefore these jobs are not among them: jobs that have had a slot here,
    because their cells are cached here; jobs in their first `SURPLUS_AFTER_S` seconds; and the jobs that the bulk share
    needs.

    Args:
        bulk: The waiting bulk jobs, in their order.
        n_surplus: Number of jobs that the worker has beyond its capacity.
        n_kept: Number of waiting bulk jobs that the bulk share needs.
        now_s: The time on the scheduler's clock.
    """
    if n_surplus <= 0:
        return []
    withdrawable = [
        job for job in [*bulk][n_kept:] if job.times.first_slot_s is None and job.received_s <= now_s - SURPLUS_AFTER_S
    ]
    return withdrawable[::-1][:n_surplus]
