"""Bounds how many tokens of a tick have their logits computed for the probabilities of prompts."""

from __future__ import annotations

from dataclasses import replace

from llamaq.worker.core.batch import Batch, PrefillChunk
from llamaq.worker.core.slot import Slot
from llamaq.worker.scheduling.strategies.batch_strategies import equal_shares


def with_bounded_scores(batch: Batch, limit: int) -> Batch:
    """Return the batch with at most `limit` tokens in the chunks of runs that score their prompts.

    Each of these tokens has a row of logits in the memory of llama.cpp, and the engine reads the whole row. The runs
    get equal shares. If there are more runs than tokens, the runs that were admitted later wait.

    Args:
        batch: The batch of a strategy.
        limit: Largest number of tokens, at least 1.
    """
    needs = {chunk.slot: chunk.n_tokens for chunk in batch.prefill if chunk.slot.active.scores_prompt}
    if sum(needs.values()) <= limit:
        return batch
    by_admission = sorted(needs, key=lambda slot: slot.active.admitted_s)
    shares: dict[Slot, int] = equal_shares({slot: needs[slot] for slot in by_admission}, limit)
    chunks = [PrefillChunk(chunk.slot, shares.get(chunk.slot, chunk.n_tokens)) for chunk in batch.prefill]
    return replace(batch, prefill=tuple([chunk for chunk in chunks if chunk.n_tokens > 0]))
