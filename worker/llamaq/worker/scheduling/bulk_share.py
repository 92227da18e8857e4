"""Keeps a share of the slots for bulk jobs while interactive jobs could use all slots.

Interactive jobs get slots first and preempt bulk jobs. Without a share, bulk jobs would wait forever if interactive
jobs always fill all slots. The share is a part of the slot time: in one tick, each slot with a job uses one slot tick.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.slot import Slot

TURN_TICKS = 32
"""Slot ticks that bulk jobs are owed before they get a turn. A smaller number would mean more preemptions."""
MAX_CREDIT = 2 * TURN_TICKS


class BulkShare:
    """Counts the slot ticks that bulk jobs are owed, and decides when bulk jobs get slots before interactive jobs.

    While bulk jobs wait or run, they are owed `share` of all slot ticks, minus the slot ticks that they use. A turn
    begins when they are owed `TURN_TICKS`, and ends when they are owed nothing.

    Args:
        share: The part of the slot time that bulk jobs get, from 0 to 1. 0: bulk jobs never go first.
        n_slots: Number of slots of the worker.
    """

    def __init__(self, share: float, n_slots: int) -> None:
        self._share = share
        self.n_slots = ceil(share * n_slots)
        """Number of slots that bulk jobs may keep, and number of bulk jobs that this worker should always have."""
        self._credit = 0.0

    @property
    def is_owed(self) -> bool:
        """Whether bulk jobs are owed slot ticks. If so, they keep up to `n_slots` slots."""
        return self._credit > 0

    def is_due(self, n_running: int) -> bool:
        """Whether the next free slot goes to a bulk job, when `n_running` bulk jobs run."""
        return n_running < self.n_slots and self._credit >= TURN_TICKS

    def n_to_claim(self, n_bulk: int) -> int:
        """Return how many bulk jobs to claim before all interactive jobs, when this worker has `n_bulk` bulk jobs.

        A bulk job can get its turn only if it is in this worker.
        """
        return max(0, self.n_slots - n_bulk)

    def record_tick(self, n_running: int, n_bulk_running: int, n_bulk_waiting: int) -> None:
        """Count one tick in which `n_running` slots had a job, `n_bulk_running` of them a bulk job."""
        if n_bulk_running or n_bulk_waiting:
            self._credit += self._share * n_running - n_bulk_running
            self._credit = min(max(self._credit, 0.0), MAX_CREDIT)

    def __repr__(self) -> str:
        return f"<BulkShare {self._share:.0%} owed={self._credit:.1f} slot ticks>"


def count_bulk(running: Iterable[Slot]) -> int:
    """Return how many of the slots run a bulk job."""
    return sum([slot.priority is Priority.BULK for slot in running])
