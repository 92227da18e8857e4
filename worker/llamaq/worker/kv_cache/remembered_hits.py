"""Remembers the reusable prefixes of waiting jobs, because the lookup of a prefix takes time.

For each admission, the prefixes of up to `MAX_COMPARED_JOBS` waiting jobs are compared. Without this memory, each of
these jobs would be looked up again for each admission.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.job import Job
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence, PrefixCache
from llamaq.worker.kv_cache.prefix_lookup import MIN_GAIN_TOKENS, PrefixHit, PrefixLookup


class _RememberedHit(NamedTuple):
    """A hit, and when it was found."""

    hit: PrefixHit
    tick: int
    """Number of the tick of the lookup."""
    n_added: int
    """Number of sequences that had been added before the lookup."""


class RememberedHits:
    """The hits of the waiting jobs. A hit is looked up again only when it may have changed.

    A remembered hit names a run or an entry that still exists, but the hit may be out of date. A new lookup may find a
    prefix that is longer by fewer than `MIN_GAIN_TOKENS` tokens, or a prefix of the same length for which the job need
    not wait. So the lookup is repeated before the job is admitted, unless `is_up_to_date` is true.

    Args:
        lookup: Finds the hits.
        cache: The entries on the device.
        can_cut: Whether a part of the tokens of a sequence can be copied. Otherwise only all of them can.
    """

    def __init__(self, lookup: PrefixLookup, cache: PrefixCache, *, can_cut: bool) -> None:
        self._lookup = lookup
        self._cache = cache
        self._can_cut = can_cut
        self._hits: dict[Job, _RememberedHit] = {}
        self._tick = 0
        """Number of the current tick."""
        self._n_added = 0
        """Number of sequences that were added."""

    def find(self, job: Job) -> PrefixHit:
        """Return the reusable prefix of the job's prompt. The entry with this prefix counts as used now."""
        remembered = self._hits.get(job)
        if remembered is not None and self._is_valid(remembered):
            if remembered.hit.matched_entry is not None:
                self._cache.touch(remembered.hit.matched_entry)
            return remembered.hit
        hit = self._lookup.find(job)
        self._hits[job] = _RememberedHit(hit, self._tick, self._n_added)
        return hit

    def _is_valid(self, remembered: _RememberedHit) -> bool:
        """Whether the source of the hit still has the prefix, and no leader has computed more of it in a later tick."""
        hit = remembered.hit
        if hit.matched_entry is not None and hit.matched_entry not in self._cache:
            return False
        if isinstance(hit.source, Run) and not self._has_prefix(hit, hit.source.n_past):
            return False
        return remembered.tick == self._tick or hit.leader is None

    def _has_prefix(self, hit: PrefixHit, n_tokens: int) -> bool:
        """Whether the prefix of the hit can be copied from the first `n_tokens` tokens of its source."""
        return hit.n_held <= n_tokens if self._can_cut else hit.n_held == n_tokens

    def is_up_to_date(self, job: Job) -> bool:
        """Whether the job's hit was found in this tick, and no sequence was added since."""
        remembered = self._hits.get(job)
        return remembered is not None and (remembered.tick, remembered.n_added) == (self._tick, self._n_added)

    def begin_tick(self) -> None:
        """Count one more tick."""
        self._tick += 1

    def add_sequence(self, tokens: bytes, scope: Scope) -> None:
        """Forget the hits to which a new sequence, a run or an entry, adds at least `MIN_GAIN_TOKENS` tokens.

        Args:
            tokens: The packed tokens that the sequence holds or will hold.
            scope: The jobs that may share the cells of the sequence.
        """
        self._n_added += 1
        for job, one in list(self._hits.items()):
            if _begins_with(tokens, scope, job, one.hit.n_tokens + MIN_GAIN_TOKENS):
                del self._hits[job]

    def replace(self, holder: CachedSequence | Run, new: CachedSequence | Run | None, n_tokens: int) -> None:
        """Let the hits that name `holder` name `new` instead. Forget those that `new` cannot serve.

        Args:
            holder: A run that has ended, or an entry that was removed.
            new: The run or entry that has the cells of `holder` now. None: there is none, so the hits are forgotten.
            n_tokens: How many tokens of `holder` have cells in `new`: the first ones.
        """
        for job, one in list(self._hits.items()):
            if one.hit.leader is not holder and one.hit.source is not holder:
                continue
            if new is None or one.hit.leader is not None or not self._has_prefix(one.hit, n_tokens):
                del self._hits[job]
            else:
                entry = new if isinstance(new, CachedSequence) else None
                self._hits[job] = one._replace(hit=replace(one.hit, source=new, matched_entry=entry))

    def forget(self, job: Job) -> None:
        """Forget the hit of a job that no longer waits."""
        self._hits.pop(job, None)

    def forget_all(self) -> None:
        """Forget all hits: a sequence that they name has lost cells."""
        self._hits.clear()

    def forget_stored(self) -> None:
        """Forget the hits that name stored blocks, because these blocks may change.

        The other hits stay: blocks that are stored now have the tokens of entries that the lookups have found.
        """
        self._hits = {job: one for job, one in self._hits.items() if one.hit.stored is None}

    @property
    def jobs(self) -> set[Job]:
        """The jobs that have a hit."""
        return set(self._hits)


def _begins_with(tokens: bytes, scope: Scope, job: Job, n_tokens: int) -> bool:
    """Whether a sequence has the first `n_tokens` tokens of a job's prompt, and may share them with the job.

    The last token of a prompt is never shared. Most sequences differ in the last token that is compared, so it is
    compared first.
    """
    end = n_tokens * TOKEN_BYTES
    last = end - TOKEN_BYTES
    if end >= len(job.packed) or tokens[last:end] != job.packed[last:end]:
        return False
    if not tokens.startswith(job.packed[:last]):
        return False
    return scope.n_shared(job.scope) != 0
