"""Finds the longest reusable prefix of a prompt: on the device, in host memory and on disk."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from llamaq.common.protocol.job_outcome import CacheTier
from llamaq.worker.core.job import Job
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.blocks.block import StoredPrefix
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence, PrefixCache

MIN_GAIN_TOKENS = 16
"""A job waits for a leader or a load only if this saves at least this many tokens more than a copy on the device."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The reusable prefix of one prompt.

    If `leader` is set, the job waits for that run, and `source` and `stored` are None. Otherwise cells are copied from
    `source`, if it is set, and then loaded from `stored`, if it is set.

    Validity: a hit describes the cache at the time of the lookup. It becomes stale when `matched_entry` is evicted, and
    when stored blocks change (at the next `Offload.step` or `Offload.discard`).
    """

    matched_entry: CachedSequence | None = None
    """The entry with the longest prefix on the device. None if a run has the longest prefix, or if there is none. The
    lookup counts the entry as used."""
    n_held: int = 0
    """Number of tokens to copy from `source`."""
    source: CachedSequence | Run | None = None
    leader: Run | None = None
    """The running job that will compute a longer prefix of the prompt. After that, the lookup is repeated."""
    n_coming: int = 0
    """The length of the prefix that `leader` will compute, in tokens."""
    stored: StoredPrefix | None = None
    """The stored prefix, longer than `n_held`. The tokens after the first `n_held` are loaded from it."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the prompt that this job need not compute."""
        return max(self.n_held, self.n_coming, self.stored.n_tokens if self.stored else 0)

    @property
    def tier(self) -> CacheTier | None:
        """The farthest tier that has some of these tokens. None: no token can be reused."""
        if self.stored:
            return self.stored.tier
        if self.leader or isinstance(self.source, Run):
            return CacheTier.RUNNING
        return CacheTier.DEVICE if self.source else None


NO_HIT = PrefixHit()


@dataclass(slots=True, eq=False)
class Candidate:
    """A waiting job that may be admitted now, and the reusable prefix of its prompt."""

    job: Job
    hit: PrefixHit
    """The reusable prefix. `KvMemory.make_room` replaces it when a later lookup finds another one, and when the matched
    entry is evicted."""


class PrefixLookup:
    """Searches running jobs, cached entries and stored blocks for the longest reusable prefix of a prompt.

    Args:
        cache: The entries and runs on the device.
        offload: The stored blocks.
        can_save_parts: Whether stored cells can be appended to a sequence that already holds cells.
    """

    def __init__(self, cache: PrefixCache, offload: Offload, *, can_save_parts: bool) -> None:
        self._cache = cache
        self._offload = offload
        self._can_save_parts = can_save_parts

    def find(self, job: Job, admitted_before: int | None = None) -> PrefixHit:
        """Return the hit that saves the most tokens of the job's history.

        The last token of the history is never part of a hit: it must be computed, because the next token is sampled
        from its logits.

        Args:
            job: The job.
            admitted_before: Only running jobs with a smaller admission number can be the leader. None allows all.
        """
        if not job.reuses_cells:
            return NO_HIT
        tokens = job.packed[:-TOKEN_BYTES]
        match = self._cache.match(tokens, job.scope, admitted_before)
        stored = self._offload.match(tokens, job.scope)
        n_stored = stored.n_tokens if stored else 0
        entry = match.source if isinstance(match.source, CachedSequence) else None
        if match.leader and match.n_coming >= max(match.n_held + MIN_GAIN_TOKENS, n_stored):
            return PrefixHit(entry, leader=match.leader, n_coming=match.n_coming)
        if n_stored < match.n_held + MIN_GAIN_TOKENS:
            return PrefixHit(entry, match.n_held, match.source)
        if not self._can_save_parts:
            return PrefixHit(entry, stored=stored)  # a complete state can be loaded only into an empty sequence
        return PrefixHit(entry, match.n_held, match.source, stored=stored)

    def n_held_by(self, job: Job, runs: AbstractSet[Run]) -> int:
        """Return how many tokens an admission of the job copies, if the device holds only the sequences of these runs.

        Returns:
            0 if this is not certain: if the job would wait for a leader, or if stored cells might be loaded instead.
        """
        if not job.reuses_cells or not self._can_save_parts:
            return 0
        match = self._cache.match_runs(job.packed[:-TOKEN_BYTES], job.scope, runs)
        waits = match.leader is not None and match.n_coming >= match.n_held + MIN_GAIN_TOKENS
        return 0 if waits else match.n_held
