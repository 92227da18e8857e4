"""Batch strategies: they decide which tokens go into the batch of a tick.

A strategy decides on plain data and owns none of it. The built-in strategies differ in the tokens that they serve first
when a tick cannot hold all of them: the next tokens of running streams, or the prompts in prefill.

Prompts in prefill get equal shares of a tick, and the unused part of a share goes to the other prompts. A short prompt
is therefore finished in the next tick or two, and a long prompt still progresses in every tick. If the oldest prompt
were served first instead, all other prompts would wait behind one long prompt. The price is that several long prompts
finish together rather than one after another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from llamaq.worker.core.batch import Batch, DecodeToken, PrefillChunk
from llamaq.worker.core.slot import Slot, SlotState


class BatchStrategy(Protocol):
    """Decides which tokens each tick computes. A worker has one instance, which may keep state between ticks."""

    def build_batch(self, slots: Sequence[Slot], budget: int, chunk_size: int, *, queue_depth: int) -> Batch:
        """Return the batch of the next tick.

        A slot in DECODE may get one `DecodeToken`. A slot in PREFILL may get one `PrefillChunk` of at most
        `slot.n_pending` tokens. At least one slot in DECODE or PREFILL must get a part. A batch that breaks these rules
        is logged, and `DecodeMaximal` plans the tick instead.

        Args:
            slots: All slots of the worker, also idle slots. They are not copies: do not change them.
            budget: Upper bound on the tokens of the batch.
            chunk_size: Upper bound on the tokens that one slot's chunk should have.
            queue_depth: Number of jobs that wait for a slot, in Redis and in this worker.
        """


class _BuiltIn(ABC):
    """Base of the built-in strategies. None of them depends on the queue depth."""

    def build_batch(
        self,
        slots: Sequence[Slot],
        budget: int,
        chunk_size: int,
        *,
        queue_depth: int,  # noqa: ARG002 - part of the protocol
    ) -> Batch:
        """Return the batch of the next tick. See `BatchStrategy.build_batch`."""
        return self._divide(slots, budget, chunk_size)

    @abstractmethod
    def _divide(self, slots: Sequence[Slot], budget: int, chunk_size: int) -> Batch:
        """Divide the budget between decode tokens and prefill chunks."""


class DecodeMaximal(_BuiltIn):
    """Gives every running stream its token in every tick. Prompts get the rest, at most one chunk in total.

    This is the default. No stream waits longer than one tick with one chunk in it, however many prompts are in prefill.
    While no stream runs, each prompt may have a chunk, and together they may use the whole budget.
    """

    def _divide(self, slots: Sequence[Slot], budget: int, chunk_size: int) -> Batch:
        decode = decode_tokens(slots, budget)
        room = budget - len(decode)
        return Batch(decode, prefill_chunks(slots, min(room, chunk_size) if decode else room, chunk_size))


class PrefillPriority(_BuiltIn):
    """Gives each prompt a chunk first, together up to the whole budget. Streams get the rest.

    Suits workloads where the time to the first token counts more than an even stream, and bulk jobs without a reader:
    slots reach DECODE soonest, and batches become wide. Streams stall while prompts are in prefill.
    """

    def _divide(self, slots: Sequence[Slot], budget: int, chunk_size: int) -> Batch:
        prefill = prefill_chunks(slots, budget, chunk_size)
        return Batch(decode_tokens(slots, budget - _count(prefill)), prefill)


class Balanced(_BuiltIn):
    """Gives half the budget to streams and half to prompts. Tokens that one group does not need go to the other group.

    Unlike with `PrefillPriority`, streams progress in every tick. Unlike with `DecodeMaximal`, several prompts may each
    have a chunk in one tick. The price is a longer tick: its batch may use the whole budget.
    """

    def _divide(self, slots: Sequence[Slot], budget: int, chunk_size: int) -> Batch:
        wanted = _count(prefill_chunks(slots, budget, chunk_size))
        decode = decode_tokens(slots, max(budget - budget // 2, budget - wanted))
        return Batch(decode, prefill_chunks(slots, budget - len(decode), chunk_size))


def decode_tokens(slots: Sequence[Slot], limit: int) -> tuple[DecodeToken, ...]:
    """Return a token for each slot in DECODE, at most `limit`. Slots with the fewest generated tokens come first."""
    decoding = [slot for slot in slots if slot.state is SlotState.DECODE]
    if len(decoding) > limit:
        least_generated = sorted(decoding, key=lambda slot: slot.active.n_generated)[: max(0, limit)]
        decoding = [slot for slot in decoding if slot in least_generated]
    return tuple(DecodeToken(slot) for slot in decoding)


def prefill_chunks(slots: Sequence[Slot], limit: int, chunk_size: int) -> tuple[PrefillChunk, ...]:
    """Return chunks for the slots in PREFILL: equal shares of `limit`, each at most `chunk_size` and `n_pending`.

    Slots that need less than an equal share are served first, and the others divide the rest. Among slots with equal
    needs the one admitted first is served first, and it gets the extra token when the division leaves a remainder.
    """
    in_prefill = [slot for slot in slots if slot.state is SlotState.PREFILL]
    by_admission = sorted(in_prefill, key=lambda slot: slot.active.admitted_s)
    needs = {slot: min(slot.n_pending, chunk_size) for slot in by_admission}
    shares: dict[Slot, int] = {}
    for n_left, slot in zip(range(len(needs), 0, -1), sorted(needs, key=needs.__getitem__), strict=True):
        shares[slot] = min(needs[slot], -(-limit // n_left))
        limit -= shares[slot]
    return tuple(PrefillChunk(slot, shares[slot]) for slot in in_prefill if shares[slot] > 0)


def _count(chunks: tuple[PrefillChunk, ...]) -> int:
    return sum(chunk.n_tokens for chunk in chunks)
