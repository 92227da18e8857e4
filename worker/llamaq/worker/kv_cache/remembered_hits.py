"""Remembers the reusable prefixes of waiting jobs, because the lookup of a long prompt takes time."""

from __future__ import annotations

from typing import NamedTuple

from llamaq.worker.core.job import Job
from llamaq.worker.kv_cache.prefix_lookup import PrefixHit, PrefixLookup


class _RememberedHit(NamedTuple):
    """A hit, and when it was found."""

    hit: PrefixHit
    tick: int
    """Number of the tick of the lookup."""


class RememberedHits:
    """The hits of the waiting jobs. A hit is looked up again only when it may have changed.

    Args:
        lookup: Finds the hits.
    """

    def __init__(self, lookup: PrefixLookup) -> None:
        self._lookup = lookup
        self._hits: dict[Job, _RememberedHit] = {}
        self._tick = 0
        """Number of the current tick."""

    def find(self, job: Job) -> PrefixHit:
        """Return the reusable prefix of the job's prompt. A lookup counts the entry with this prefix as used now."""
        remembered = self._hits.get(job)
        if remembered is not None and (remembered.tick == self._tick or not remembered.hit.may_grow):
            return remembered.hit
        hit = self._lookup.find(job)
        self._hits[job] = _RememberedHit(hit, self._tick)
        return hit

    def is_from_earlier_tick(self, job: Job) -> bool:
        """Whether the job has a hit from an earlier tick. A run may hold more of the prompt by now."""
        remembered = self._hits.get(job)
        return remembered is not None and remembered.tick != self._tick

    def begin_tick(self) -> None:
        """Count one more tick."""
        self._tick += 1

    def forget_all(self) -> None:
        """Forget all hits: a sequence or a stored block that they name may have changed."""
        self._hits.clear()
