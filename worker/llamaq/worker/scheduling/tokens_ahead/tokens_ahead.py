"""Adds tokens ahead to the batch of a tick: those that a grammar forces, and those that are drafted.

Both follow the last sampled token of a slot. They share the room that the batch, the KV memory and the target of the
strategy leave, and beside prompts the room in the pass over the weights. Forced tokens come first, because they are
certain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from llamaq.worker.core.batch import Batch, SlotResult
from llamaq.worker.core.draft import Draft
from llamaq.worker.core.slot import Run
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.scheduling.strategies.guarded_strategy import GuardedStrategy
from llamaq.worker.scheduling.tokens_ahead.forced_tokens import ForcedTokens
from llamaq.worker.scheduling.tokens_ahead.speculation import Speculation


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
        self._forced = ForcedTokens(can_remove=memory.can_remove_draft, is_limited=strategy.has_draft_limit)
        self._limit_s = inf
        """Longest time of a tick with tokens ahead, as of the last plan, in seconds."""
        self._has_grammar = False
        """Whether a job of the last plan has a grammar."""

    def add(self, batch: Batch) -> Batch:
        """Return the batch with its tokens ahead."""
        has_grammar = any(part.slot.active.job.sampler.can_prepare for part in batch.decode)
        self._has_grammar = has_grammar
        if not has_grammar and self._speculation is None:
            return batch
        self._limit_s = limit_s = self._strategy.draft_limit_s(self._memory.slots)
        if has_grammar:
            batch = self._with_forced(batch, limit_s)
        if self._speculation is not None:
            left_s = self._forced.left_s(batch, limit_s)
            batch = self._speculation.add_drafts(batch, self._room(batch), left_s)
        return batch

    def _with_forced(self, batch: Batch, limit_s: float) -> Batch:
        """Return the batch with its forced tokens.

        They may take the place of tokens of a prompt that does not end in this tick. Both take as long, and all of them
        have to be computed.
        """
        longest = max([one for one in batch.prefill if not one.is_last], key=lambda one: one.n_tokens, default=None)
        n_replaceable = 0 if longest is None else longest.n_tokens - 1
        n_left = self._n_left_in_tick(batch)
        room = min(n_left + n_replaceable, self._memory.n_cells_for_drafts)
        batch = self._forced.add(batch, room, limit_s)
        n_replaced = batch.n_forced - n_left
        if longest is None or n_replaced <= 0:
            return batch
        shorter = longest._replace(n_tokens=longest.n_tokens - n_replaced)
        return replace(batch, prefill=tuple([shorter if one is longest else one for one in batch.prefill]))

    @property
    def needs_plan(self) -> bool:
        """Whether a tick with drafts needs a plan: to find the drafts, or to remove their tokens afterwards."""
        search_needs_plan = self._speculation is not None and self._speculation.needs_plan
        return search_needs_plan or not self._memory.can_remove_draft

    def add_drafts(self, batch: Batch) -> Batch:
        """Return the batch of a repeated tick with drafts. It has no forced tokens."""
        if self._speculation is None:
            return batch
        return self._speculation.add_drafts(batch, self._room(batch), self._limit_s)

    def _room(self, batch: Batch) -> int:
        """Return how many draft tokens can be added to a batch."""
        return min(self._n_left_in_tick(batch), self._memory.n_cells_for_drafts - batch.n_forced)

    def _n_left_in_tick(self, batch: Batch) -> int:
        """Return how many tokens the tick can compute in addition to a batch.

        Beside prompts, this is what the pass over the weights has left that the batch needs in any case (see
        `DecodeMaximal`). With one token more, llama.cpp would make another pass.
        """
        limits = self._strategy.limits
        n_left = limits.budget - batch.n_tokens
        return min(n_left, -batch.n_tokens % limits.chunk_size) if batch.prefill else n_left

    def forces_after(self, runs: Sequence[Run]) -> bool:
        """Return whether the next plan adds forced tokens; see `ForcedTokens.adds_after`."""
        return self._forced.adds_after(runs)

    def n_unsearched(self, runs: Iterable[Run]) -> int:
        """Return the number of ticks before drafts of these runs are searched for. Unlimited if no job drafts."""
        if self._speculation is None or all(run.job.drafting is None for run in runs):
            return sys.maxsize
        return self._speculation.n_unsearched

    def record_tick(self, batch: Batch, seconds: float) -> None:
        """Learn from the time of a tick."""
        self._forced.record_tick(batch, seconds, has_grammar=self._has_grammar)
        if self._speculation is not None:
            self._speculation.record_tick(batch, seconds)

    def end_tick(self, result: SlotResult, draft: Draft, n_before: int, n_accepted: int) -> None:
        """Remove the cells of tokens ahead that were not accepted, and record the outcome of a draft.

        Args:
            result: What the engine computed for a slot. The tokens that were sampled are part of the history now.
            draft: The draft of the slot.
            n_before: Number of tokens of the history before the tick.
            n_accepted: Number of tokens ahead that were accepted.
        """
        n_verified = result.n_past - n_before
        if n_verified <= 0:  # the tokens ahead were not computed, or there were none
            return
        # The sequence holds the earlier history and then the tokens ahead. It does not hold the last sampled token.
        self._memory.remove_after(result.slot, n_before + n_accepted)
        drafting = result.slot.active.job.drafting
        if draft.tokens and self._speculation is not None and drafting is not None:
            self._speculation.record_draft(drafting, draft.first(n_verified), n_accepted)

    def __repr__(self) -> str:
        return f"<TokensAhead {self._forced!r} {self._speculation!r}>"
