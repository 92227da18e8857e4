"""Adds tokens ahead to the batch of a tick: those that a grammar forces, and those that are drafted.

Both follow the last sampled token of a slot. They share the room that the batch, the KV memory and the target of the
strategy leave. Forced tokens come first, because they are certain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from llamaq.worker.core.batch import Batch
from llamaq.worker.core.slot import Run
from llamaq.worker.core.token_draft import Draft
from llamaq.worker.kv_cache.kv_cache_manager import KvMemory
from llamaq.worker.scheduling.forced_tokens import ForcedTokens
from llamaq.worker.scheduling.guarded_strategy import GuardedStrategy
from llamaq.worker.scheduling.speculation import Speculation


class TokensAhead:
    """Decides which tokens ahead a tick computes.

    Args:
        memory: The slots and the KV memory.
        strategy: Plans the batches.
        speculation: Adds the drafts. None: no tokens are drafted.
    """

    def __init__(self, memory: KvMemory, strategy: GuardedStrategy, speculation: Speculation | None) -> None:
        self._memory = memory
        self._strategy = strategy
        self._speculation = speculation
        self._forced = ForcedTokens(can_remove=memory.can_remove_draft)

    def add(self, batch: Batch) -> Batch:
        """Return the batch with its tokens ahead."""
        has_grammar = any(part.slot.active.job.sampler.can_prepare for part in batch.decode)
        if not has_grammar and self._speculation is None:
            return batch
        room = min(self._strategy.limits.budget - batch.n_tokens, self._memory.n_cells_for_drafts)
        limit_s = self._strategy.draft_limit_s(self._memory.slots)
        if has_grammar:
            batch = self._forced.add(batch, room, limit_s)
        if self._speculation is not None:
            left_s = self._forced.left_s(batch, limit_s)
            batch = self._speculation.add_drafts(batch, room - batch.n_forced, left_s)
        return batch

    def n_forced_after(self, run: Run) -> int:
        """Return how many tokens must follow the history of a run, as far as they may be added to a batch."""
        if not self._forced.may_follow(run):
            return 0
        return len(run.job.sampler.forced_tokens(run.tokens, run.n_prompt))

    def n_unsearched(self, runs: Iterable[Run]) -> int:
        """Return the number of ticks before drafts of these runs are searched for. Unlimited if no job drafts."""
        if self._speculation is None or all(run.job.drafting is None for run in runs):
            return sys.maxsize
        return self._speculation.n_unsearched

    def finds_no_draft(self, batch: Batch) -> bool:
        """Search for drafts. Return whether the next plan would add no draft to the decode tokens of `batch`."""
        return self._speculation is None or self._speculation.finds_none(batch)

    def record_tick(self, batch: Batch, seconds: float) -> None:
        """Learn from the time of a tick."""
        self._forced.record_tick(batch, seconds)
        if self._speculation is not None:
            self._speculation.record_tick(batch, seconds)

    def record_draft(self, run: Run, draft: Draft, n_accepted: int) -> None:
        """Record the outcome of a draft that was verified."""
        if self._speculation is not None and run.job.drafting is not None:
            self._speculation.record_draft(run.job.drafting, draft, n_accepted)

    def __repr__(self) -> str:
        return f"<TokensAhead {self._forced!r} {self._speculation!r}>"
