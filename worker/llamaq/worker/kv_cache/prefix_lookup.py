"""How a prompt's first tokens come into a sequence without being computed there."""

from __future__ import annotations

from dataclasses import dataclass

from llamaq.worker.core.job import Job
from llamaq.worker.core.slot import Run
from llamaq.worker.core.tokens import TOKEN_BYTES
from llamaq.worker.kv_cache.blocks.block import Chain
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache import Entry, PrefixCache

MIN_GAIN = 16
"""Tokens. For fewer than these nobody waits for another's prefill or for a transfer."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What is done for one prompt."""

    n_held: int = 0
    source: Entry | Run | None = None
    """Copy `n_held` cells of it now,"""
    leader: Run | None = None
    n_coming: int = 0
    """or wait until it has computed so many, and look again,"""
    stored: Chain | None = None
    """and load what goes on from there."""

    @property
    def n_tokens(self) -> int:
        """How many tokens need not be computed."""
        return max(self.n_held, self.n_coming, self.stored.n_tokens if self.stored else 0)


class PrefixLookup:
    """Looks for a prompt's beginning in all places: running jobs, entries, and the tiers behind the device."""

    def __init__(self, cache: PrefixCache, tiers: Offload, *, in_blocks: bool) -> None:
        """`in_blocks`: what is stored can be loaded after cells that a sequence holds already."""
        self._cache = cache
        self._tiers = tiers
        self._in_blocks = in_blocks

    def find(self, job: Job, order: int | None = None) -> PrefixHit:
        """The way that spares most for a job's prompt, all but its last token: its logits give the next one.

        Of the running jobs it waits only for those admitted before number `order`; None: for any.
        """
        if not job.request.cache_prompt:
            return PrefixHit()
        tokens = job.packed[:-TOKEN_BYTES]
        found = self._cache.match(tokens, job.scope, order)
        stored = self._tiers.find(tokens, job.scope)
        n_stored = stored.n_tokens if stored else 0
        if found.leader and found.n_coming >= max(found.n_tokens + MIN_GAIN, n_stored):
            return PrefixHit(leader=found.leader, n_coming=found.n_coming)
        if n_stored < found.n_tokens + MIN_GAIN:
            return PrefixHit(found.n_tokens, found.source)
        if not self._in_blocks:
            return PrefixHit(stored=stored)  # all of it, which nothing goes before
        return PrefixHit(found.n_tokens, found.source, stored=stored)
