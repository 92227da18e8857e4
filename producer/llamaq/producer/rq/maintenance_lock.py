"""An RQ queue whose maintenance is soon done by another RQ worker, if the one that does it dies."""

from __future__ import annotations

from llamaq.producer.rq.library import Queue

LOCK_S = 60
"""Longest time of a search for abandoned jobs in which no other RQ worker searches."""


class ShortLockQueue(Queue):
    """An RQ queue. RQ locks its maintenance for 15 minutes, and an RQ worker that loses its connection meanwhile does
    not release this lock: in this time, no RQ worker would find an abandoned run.
    """

    def acquire_maintenance_lock(self) -> bool:
        """Return whether this RQ worker may search for abandoned jobs now."""
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=LOCK_S))
