"""Batch strategies: they decide which tokens go into the batch of a tick.

A strategy reads the slots and returns a batch. It changes nothing. Two groups of tokens are ready for a tick: the next
token of each running stream, and the prompts in prefill. A tick cannot always contain all of them. The built-in
strategies differ in the group that they serve first.

Prompts in prefill get equal shares of a tick, and the unused part of a share goes to the other prompts. A short prompt
is therefore computed within one or two ticks, and a long prompt still progresses in every tick. If the oldest prompt
were served first instead, all other prompts would wait behind one long prompt. The disadvantage of equal shares is that
several long prompts finish at about the same time, and not one after another. If a tick has fewer tokens for prompts
than there are prompts, the oldest prompt gets one of them, and the shortest prompts get the others.

If a tick can complete all prompts of interactive jobs, the prompts of bulk jobs wait for this tick, so that the first
tokens of the interactive jobs come earlier. Prompts of bulk jobs never wait for two ticks in a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from llamaq.common.protocol.job_request import Priority
from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.slot import Slot, SlotState
from llamaq.worker.scheduling.strategies.tick_times import TickTime


class BatchStrategy(Protocol):
    """Decides which tokens each tick computes. A worker has one instance, which may keep state between ticks."""

    def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
        """Return the batch of the next tick.

        A slot in DECODE may get one `DecodeToken`. A slot in PREFILL may get one `PrefillChunk` of at most
        `slot.n_pending` tokens. At least one slot in DECODE or PREFILL must get a part. A batch that breaks these rules
        is logged, and `DecodeMaximal` plans the tick instead.

        Args:
            slots: All slots of the worker, including idle slots. These are the worker's own objects: do not change
                them.
            budget: Upper bound on the number of tokens in the batch.
            chunk_size: Upper bound on the number of tokens in one slot's chunk.
            queue_depth: Number of jobs of the queue without a slot.
        """


@runtime_checkable
class TickTimeReader(Protocol):
    """A batch strategy that plans by the times of earlier ticks has this method in addition to `build_batch`."""

    def record_tick(self, tick: TickTime) -> None:
        """Receive the measured time of a tick. Each tick that computed something is reported once, in order.

        A tick may have computed fewer prompt tokens than the strategy planned.
        """


@runtime_checkable
class DraftLimit(Protocol):
    """A batch strategy that bounds the time of a tick has this method in addition to `build_batch`."""

    def draft_limit_s(self, slots: Sequence[Slot]) -> float:
        """Return how many seconds a tick with drafts may take. 0: the next tick gets no drafts.

        Args:
            slots: All slots of the worker, for which `build_batch` has built the batch of the tick.
        """


class BuiltInStrategy(ABC):
    """Base of the built-in strategies. None of them depends on the queue depth."""

    _have_waited = False
    """Whether bulk prompts waited in the last tick."""

    def build_batch(
        self,
        slots: Sequence[Slot],
        budget: int,
        chunk_size: int,
        *,
        queue_depth: int,  # noqa: ARG002 - part of the protocol
    ) -> Batch:
        """Return the batch of the next tick. See `BatchStrategy.build_batch`."""
        slots = [slot for slot in slots if slot.run is not None]
        waiting = () if self._have_waited else bulk_prompts_to_delay(slots, chunk_size)
        self._have_waited = bool(waiting)
        return self._divide([slot for slot in slots if slot not in waiting] if waiting else slots, budget, chunk_size)

    @abstractmethod
    def _divide(self, slots: Sequence[Slot], budget: int, chunk_size: int) -> Batch:
        """Divide the budget between decode tokens and prefill chunks."""


class DecodeMaximal(BuiltInStrategy):
    """Gives every running stream its next token in every tick. Prompts share the rest of one chunk.

    This is the default. With any number of prompts in prefill, a stream waits at most one tick for its next token, and
    this tick contains at most `chunk_size` tokens. If the streams need more than half of them, prompts still get half a
    chunk. While no stream runs, each prompt may get a chunk, and the chunks together may use the whole budget.

    The tokens of the streams count, because llama.cpp computes at most `n_ubatch` tokens in one pass over the weights,
    and `chunk_size` is usually `n_ubatch`. With a few tokens more, it would make a second pass for them.
    """

    def _divide(self, slots: Sequence[Slot], budget: int, chunk_size: int) -> Batch:
        decode = decode_tokens(slots, budget)
        limit = budget - len(decode)
        if decode:
            limit = min(limit, max(chunk_size - len(decode), (chunk_size + 1) // 2))
        return Batch(decode, prefill_chunks(slots, limit, chunk_size))


class PrefillPriority(BuiltInStrategy):
    """Gives each prompt a chunk first. The chunks together may use the whole budget. Streams get the rest.

    Choose this strategy when the time to the first token is more important than a steady stream, or for bulk jobs whose
    output no user watches. Slots reach DECODE as early as possible, so each batch decodes for many slots. Streams stall
    while prompts are in prefill.
    """

    def _divide(self, slots: Sequence[Slot], budget: int, chunk_size: int) -> Batch:
        prefill = prefill_chunks(slots, budget, chunk_size)
        return Batch(decode_tokens(slots, budget - _count(prefill)), prefill)


class Balanced(BuiltInStrategy):
    """Gives half the budget to streams and half to prompts. Tokens that one group does not need go to the other group.

    Unlike with `PrefillPriority`, streams progress in every tick. Unlike with `DecodeMaximal`, several prompts may each
    get a chunk in the same tick. The disadvantage is a longer tick, because its batch may use the whole budget.
    """

    def _divide(self, slots: Sequence[Slot], budget: int, chunk_size: int) -> Batch:
        wanted = _count(prefill_chunks(slots, budget, chunk_size))
        decode = decode_tokens(slots, max(budget - budget // 2, budget - wanted))
        return Batch(decode, prefill_chunks(slots, budget - len(decode), chunk_size))


def bulk_prompts_to_delay(slots: Sequence[Slot], chunk_size: int) -> Sequence[Slot]:
    """Return the bulk jobs in PREFILL, if one chunk completes the prompts of all interactive jobs in PREFILL."""
    in_prefill = [slot for slot in slots if slot.state is SlotState.PREFILL]
    if not in_prefill:
        return ()
    bulk = [slot for slot in in_prefill if slot.priority is Priority.BULK]
    n_interactive = sum(slot.n_pending for slot in in_prefill if slot.priority is Priority.INTERACTIVE)
    return bulk if 0 < n_interactive <= chunk_size else ()


def decode_tokens(slots: Sequence[Slot], limit: int) -> tuple[DecodeToken, ...]:
    """Return one decode token for each slot in DECODE, at most `limit` in total.

    Slots with fewer generated tokens come first.

    Args:
        slots: All slots of the worker.
        limit: Largest number of decode tokens.
    """
    decoding = [slot for slot in slots if slot.state is SlotState.DECODE]
    if len(decoding) > limit:
        least_generated = sorted(decoding, key=lambda slot: slot.active.n_generated)[: max(0, limit)]
        decoding = [slot for slot in decoding if slot in least_generated]
    return tuple([DecodeToken(slot) for slot in decoding])


def prefill_chunks(slots: Sequence[Slot], limit: int, chunk_size: int) -> tuple[PrefillChunk, ...]:
    """Return chunks for the slots in PREFILL: equal shares of `limit`, each at most `chunk_size` and `n_pending`.

    A slot that needs less than an equal share gets only what it needs. The other slots divide the rest. If the division
    leaves a remainder, the slots whose jobs were admitted earlier get one more token each. If there are fewer tokens
    than slots, the job that was admitted first gets one, so that no later job can stop it, and the shortest prompts
    get the others, those of interactive jobs first.

    Args:
        slots: All slots of the worker.
        limit: Largest number of tokens in all chunks together.
        chunk_size: Largest number of tokens in one chunk.
    """
    in_prefill = [slot for slot in slots if slot.state is SlotState.PREFILL]
    if not in_prefill:
        return ()
    order = sorted(in_prefill, key=lambda slot: slot.active.admitted_s)
    if limit < len(order):
        order[1:] = sorted(order[1:], key=lambda slot: (slot.priority is Priority.BULK, slot.n_pending))
    shares = equal_shares({slot: min(slot.n_pending, chunk_size) for slot in order}, limit)
    return tuple(PrefillChunk(slot, shares[slot]) for slot in in_prefill if shares[slot] > 0)


def equal_shares(needs: Mapping[Slot, int], limit: int) -> dict[Slot, int]:
    """Divide `limit` tokens equally between slots. What a slot does not need is divided between the others.

    Args:
        needs: Largest number of tokens for each slot. If the division leaves a remainder, the first slots that need
            more than an equal share get one more token each.
        limit: Largest number of tokens for all slots together.
    """
    share, n_more = _equal_share(sorted(needs.values()), limit)
    shares: dict[Slot, int] = {}
    for slot, need in needs.items():
        shares[slot] = min(need, share)
        if need > share and n_more:
            shares[slot] += 1
            n_more -= 1
    return shares


def _equal_share(needs: Sequence[int], limit: int) -> tuple[int, int]:
    """Return the share of each slot that needs more than this share, and the remainder of the division.

    Args:
        needs: Largest number of tokens for each slot, the smallest number first.
        limit: Largest number of tokens for all slots together.
    """
    for n_left, need in zip(range(len(needs), 0, -1), needs, strict=True):
        if need * n_left > limit:
            return divmod(limit, n_left)
        limit -= need
    return max(needs, default=0), 0


def _count(chunks: tuple[PrefillChunk, ...]) -> int:
    return sum(chunk.n_tokens for chunk in chunks)
