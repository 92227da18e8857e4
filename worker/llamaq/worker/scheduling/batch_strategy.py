"""Strategies: which tokens go into the batch of a tick.

A strategy decides on plain data and owns nothing. The built-in ones differ in what they put first when a tick
cannot take everything: the next token of streams that run, or prompts that wait to be read.

Prompts that are read at the same time share a tick equally, and what one does not need the others get. So a
short prompt is done in the next tick or two however long its neighbours are, and a long one still moves in every
tick; reading the oldest first would make everybody wait behind one long prompt. The price is that several long
prompts end together rather than one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.slot import Slot, SlotState


class BatchStrategy(Protocol):
    """Decides what one tick computes. One instance serves one worker, and may remember things between ticks."""

    def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
        """The batch of the next tick.

        Args:
            slots: All slots of the worker, idle ones too. They are live: look, do not change.
            budget: The most tokens that the batch may have.
            chunk_size: The most tokens that one slot's chunk should have.
            queue_depth: Jobs that wait for a slot, in Redis and in this worker.

        A slot in DECODE may get one `DecodeToken`, one in PREFILL a `PrefillChunk` of at most `slot.n_pending`
        tokens. At least one slot that works must get something. What breaks these rules is reported, and the
        tick is planned by `DecodeMaximal` instead.
        """


class DecodeMaximal:
    """Every running stream gets its token in every tick; prompts get what is left, at most one chunk in all.

    The default. No stream waits longer than a tick with one chunk in it, however many prompts are read. While
    no stream runs, each prompt may take a chunk, together up to the whole budget.
    """

    def build_batch(
        self,
        slots: Sequence[Slot],
        budget: int,
        chunk_size: int,
        *,
        queue_depth: int,  # noqa: ARG002 - the protocol's
    ) -> Batch:
        decode = decode_tokens(slots, budget)
        room = budget - len(decode)
        return Batch(decode, prefill_chunks(slots, min(room, chunk_size) if decode else room, chunk_size))


class PrefillPriority:
    """Prompts first, each a chunk and together the whole budget; streams get what they leave.

    Good where the first token counts more than an even stream, and for bulk work that nobody watches: slots are
    filled soonest, and then decode in the widest batches. Streams stutter while prompts are read.
    """

    def build_batch(
        self,
        slots: Sequence[Slot],
        budget: int,
        chunk_size: int,
        *,
        queue_depth: int,  # noqa: ARG002 - the protocol's
    ) -> Batch:
        prefill = prefill_chunks(slots, budget, chunk_size)
        return Batch(decode_tokens(slots, budget - _count(prefill)), prefill)


class Balanced:
    """Half the budget for streams and half for prompts; what one half does not need the other gets.

    Streams are never left out as with `PrefillPriority`, and several prompts may be read in one tick, each with
    a chunk, which `DecodeMaximal` does not do. A stream's gap is up to a tick with a full budget.
    """

    def build_batch(
        self,
        slots: Sequence[Slot],
        budget: int,
        chunk_size: int,
        *,
        queue_depth: int,  # noqa: ARG002 - the protocol's
    ) -> Batch:
        wanted = _count(prefill_chunks(slots, budget, chunk_size))
        decode = decode_tokens(slots, max(budget - budget // 2, budget - wanted))
        return Batch(decode, prefill_chunks(slots, budget - len(decode), chunk_size))


def decode_tokens(slots: Sequence[Slot], limit: int) -> tuple[DecodeToken, ...]:
    """A token for every slot in DECODE; where `limit` is too small, for those that have generated least."""
    decoding = [slot for slot in slots if slot.state is SlotState.DECODE]
    if len(decoding) > limit:
        behind = sorted(decoding, key=lambda slot: slot.active.n_generated)[: max(0, limit)]
        decoding = [slot for slot in decoding if slot in behind]
    return tuple(DecodeToken(slot) for slot in decoding)


def prefill_chunks(slots: Sequence[Slot], limit: int, chunk_size: int) -> tuple[PrefillChunk, ...]:
    """Chunks for the slots in PREFILL: equal shares of `limit`, each at most `chunk_size` and what is pending.

    Slots that need less than their share are served first and leave the rest to the others. Between equals the
    one admitted first is served first, and gets the token more that does not divide.
    """
    reading = [slot for slot in slots if slot.state is SlotState.PREFILL]
    needs = {slot: min(slot.n_pending, chunk_size) for slot in sorted(reading, key=lambda slot: slot.active.admitted_s)}
    shares: dict[Slot, int] = {}
    for n_left, slot in zip(range(len(needs), 0, -1), sorted(needs, key=needs.__getitem__), strict=True):
        shares[slot] = min(needs[slot], -(-limit // n_left))
        limit -= shares[slot]
    return tuple(PrefillChunk(slot, shares[slot]) for slot in reading if shares[slot] > 0)


def _count(chunks: tuple[PrefillChunk, ...]) -> int:
    return sum(chunk.n_tokens for chunk in chunks)
