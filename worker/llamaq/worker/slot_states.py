"""Slots' states on explicit demand: they are read out, put back and forgotten.

All of it runs on the engine thread, between ticks. Reading out and putting back go in steps of a few milliseconds, a
block of tokens at least, and between two steps anything may happen: jobs come and go, entries move between the tiers.
Where memory is not saved in parts, a state is one block: ticks then wait for as long as its copy takes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from llamaq.common.errors import EngineError, OrderRefused
from llamaq.common.messages import SlotSnapshot
from llamaq.worker.block import Scope
from llamaq.worker.block_tiers import BLOCK_TOKENS, StateMover
from llamaq.worker.memory import Memory, Room, Sequences
from llamaq.worker.prefix_cache import Entry
from llamaq.worker.prefix_index import TOKEN_BYTES, common_prefix
from llamaq.worker.slots import Run, Slot
from llamaq.worker.state_parts import StatePart
from llamaq.worker.tiers import Tiers

STEP_S = 0.005
"""A step begins no further block after this."""


class Mover(Sequences, StateMover, Protocol):
    """What of the engine is needed here."""

    @property
    def cells_per_sequence(self) -> int:
        """The most cells that one sequence can have."""


@dataclass(slots=True, eq=False)
class Reading:
    """A state on its way out: these packed tokens, as far as there are parts."""

    tokens: bytes
    scope: Scope
    run: Run | None = None
    """The job, if it was running when this began."""
    parts: list[StatePart] = field(default_factory=list)
    coming: tuple[int, int] = (0, 0)
    """The part that `SlotStates.read_some` has told to wait for."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def n_read(self) -> int:
        return self.parts[-1].end if self.parts else 0

    @property
    def is_complete(self) -> bool:
        return self.n_read == self.n_tokens

    def take(self, data: bytes | None) -> None:
        """What was waited for has come; raises `OrderRefused` when it has gone."""
        if data is None:
            raise _gone()
        self.parts.append(StatePart(*self.coming, data))


@dataclass(slots=True, eq=False)
class Putting:
    """A state on its way in. Until it is complete nobody can find it."""

    slot: Slot
    tokens: bytes
    scope: Scope
    parts: Sequence[StatePart]
    entry: Entry | None = None
    """Its place; None where all of it was there."""
    n_held: int = 0

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def is_complete(self) -> bool:
        return self.n_held == self.n_tokens


class SlotStates:
    """What can be done with the states of a worker's slots. `OrderRefused` says why something cannot."""

    def __init__(
        self, memory: Memory, mover: Mover, tiers: Tiers, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._memory = memory
        self._pool = memory.pool
        self._mover = mover
        self._tiers = tiers
        self._clock = clock
        self._puttings: list[Putting] = []
        """Those that are under way."""

    def look(self) -> tuple[SlotSnapshot, ...]:
        """The slots as they are now."""
        return tuple(slot.snapshot() for slot in self._pool)

    # ---- out

    def begin_reading(self, index: int) -> Reading:
        """Begin to read the state of the job that runs in the slot, or of the one that ran there last."""
        slot = self._slot(index)
        run = slot.run
        if run is not None:
            reading = Reading(run.packed_history(run.n_past), run.job.scope, run)
        else:
            n_tokens = self._n_there(slot.content, slot.scope)
            reading = Reading(slot.content[: n_tokens * TOKEN_BYTES], slot.scope)
        if not reading.tokens:
            raise OrderRefused(f"slot {index} has no state: nothing has run there, or the cache has given it up")
        if run is not None and not self._mover.in_blocks:
            self._read_from_device(reading)  # now: after the next tick it holds more, and cannot be read in part
        return reading

    def read_some(self, reading: Reading) -> Future[bytes | None] | None:
        """Go on reading. The next part may have to come from disk: then it is to be waited for, and taken."""
        until_s = self._clock() + STEP_S
        while not reading.is_complete:
            if not self._read_from_device(reading):
                data = self._read_from_tiers(reading)
                if not data.done():
                    return data
                reading.take(data.result())
            if self._clock() >= until_s:
                break
        return None

    def _n_there(self, tokens: bytes, scope: Scope) -> int:
        """How many of the tokens have cells, on the device or behind it."""
        stored = self._tiers.find(tokens, scope)
        holder, n_held = self._holder(tokens, scope)
        return max(n_held if holder else 0, stored.n_tokens if stored else 0)

    def _holder(self, tokens: bytes, scope: Scope) -> tuple[Entry | Run | None, int]:
        """Who on the device has the longest beginning of these tokens, and how many of them."""
        found = self._memory.cache.match(tokens, scope)
        if found.source and not self._mover.in_blocks and _scope_of(found.source).key != scope.key:
            return None, 0  # all of it would be saved, with what is no business of this scope
        return found.source, found.n_tokens

    def _read_from_device(self, reading: Reading) -> bool:
        run = reading.run
        if run is not None and not run.has_left and run.n_past > reading.n_read:
            source: Entry | Run | None = run
            n_held = min(run.n_past, reading.n_tokens)
        else:
            source, n_held = self._holder(reading.tokens, reading.scope)
        start, end = reading.n_read, n_held
        if source is None or end <= start:
            return False
        if self._mover.in_blocks:
            saved_end = end = min(end, (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        elif end < reading.n_tokens:
            return False
        else:
            saved_end = source.n_past if isinstance(source, Run) else source.n_tokens
        try:
            reading.parts.append(StatePart(start, end, self._mover.save(source.seq_id, start, saved_end)))
        except EngineError as exc:
            raise OrderRefused(f"the state could not be read: {exc}") from exc
        return True

    def _read_from_tiers(self, reading: Reading) -> Future[bytes | None]:
        stored = self._tiers.find(reading.tokens, reading.scope)
        for block in stored.blocks if stored else ():
            end = min(block.end, reading.n_tokens)
            if block.start <= reading.n_read < end:
                reading.coming = (block.start, end)
                return self._tiers.read(block)
        raise _gone()

    # ---- in

    def begin_putting(
        self, index: int, tokens: bytes, scope: Scope, parts: Sequence[StatePart]
    ) -> Putting | None:
        """Begin to put a state into the cache, as the slot's content. None while others are leaving to make room."""
        slot = self._idle_slot(index)
        putting = Putting(slot, tokens, scope, parts)
        limit = self._mover.cells_per_sequence
        if putting.n_tokens > limit:
            raise OrderRefused(f"a state of {putting.n_tokens} tokens does not fit into {limit} cells (--n-ctx)")
        if self._is_kept(tokens, scope):
            putting.n_held = putting.n_tokens
            self._settle(putting)
            return putting
        n_shareable = self._n_shareable(putting)
        room = self._memory.make_way(putting.n_tokens - n_shareable)
        if room is Room.NONE:
            raise OrderRefused(f"there is no room for {putting.n_tokens} tokens beside the jobs that run")
        if room is Room.SOON or self._n_shareable(putting) < n_shareable:  # the latter: what was shared had to go
            return None
        self._take_place(putting)
        return putting

    def put_some(self, putting: Putting) -> None:
        """Go on putting; at the end the state is there for all jobs of its scope."""
        until_s = self._clock() + STEP_S
        while not putting.is_complete:
            entry = putting.entry
            if entry is None or entry not in self._memory.cache.entries():
                raise OrderRefused("the state had to give way to jobs that run: there is no room for it")
            part = next(part for part in putting.parts if part.end > putting.n_held)
            if not self._mover.load(entry.seq_id, putting.n_held, part.end, bytes(part.data), part.first):
                raise OrderRefused("llama.cpp does not take this state")
            putting.n_held = part.end
            if self._clock() >= until_s:
                break
        if putting.is_complete:
            self._settle(putting)

    def end_putting(self, putting: Putting) -> None:
        """Take back what is not complete."""
        if putting in self._puttings:
            self._puttings.remove(putting)
            if putting.entry in self._memory.cache.entries():
                self._memory.forget(putting.entry)

    def close(self) -> None:
        """Take back what is under way: the cache is about to be saved."""
        for putting in list(self._puttings):
            self.end_putting(putting)

    def _is_kept(self, tokens: bytes, scope: Scope) -> bool:
        found = self._memory.cache.match(tokens, scope)
        is_entry = isinstance(found.source, Entry) and not found.source.leaving
        return is_entry and found.n_tokens * TOKEN_BYTES == len(tokens)

    def _n_shareable(self, putting: Putting) -> int:
        found = self._memory.cache.match(putting.tokens, putting.scope)
        return found.n_tokens if self._mover.in_blocks else 0

    def _take_place(self, putting: Putting) -> None:
        """A sequence with all the cells that it will have, kept for a scope that nobody else is in.

        It counts as leaving, so that jobs that need its place wait for the end rather than have it saved.
        """
        seq_id = self._pool.keep_another()
        found = self._memory.cache.match(putting.tokens, putting.scope)
        if self._mover.in_blocks and found.source is not None:
            putting.n_held = self._mover.copy(found.source.seq_id, seq_id, found.n_tokens)
            self._pool.share(found.source.seq_id, seq_id, putting.n_held)
        self._pool.hold(seq_id, putting.n_tokens)
        self._memory.keep(seq_id, putting.tokens, Scope(secrets.token_bytes(32)))
        putting.entry = self._memory.cache.entries()[-1]
        putting.entry.leaving = True
        self._puttings.append(putting)

    def _settle(self, putting: Putting) -> None:
        if putting.entry is not None:
            self._puttings.remove(putting)
            self._memory.cache.remove(putting.entry)
            self._memory.keep(putting.entry.seq_id, putting.tokens, putting.scope)
        if putting.slot.run is None:  # else another job has come meanwhile
            putting.slot.content, putting.slot.scope = putting.tokens, putting.scope

    # ---- away

    def erase(self, index: int) -> int:
        """Forget the slot's content, and the cells that nobody else's content needs; returns how many tokens it had."""
        slot = self._idle_slot(index)
        tokens, scope = slot.content, slot.scope
        own, others = self._entries_of(tokens, scope)
        n_kept = max((common_prefix(other.tokens, tokens) for other in others), default=0)
        for entry in own:
            if entry.n_tokens > n_kept:
                self._memory.forget(entry)
        self._tiers.forget(tokens, scope, n_kept)
        slot.content, slot.scope = b"", Scope()
        return len(tokens) // TOKEN_BYTES

    def _entries_of(self, tokens: bytes, scope: Scope) -> tuple[list[Entry], list[Entry]]:
        """The entries of this scope that hold beginnings of these tokens, and those that hold something else."""
        entries = [entry for entry in self._memory.cache.entries() if entry.scope.key == scope.key]
        own = [entry for entry in entries if tokens.startswith(entry.tokens)]
        return own, [entry for entry in entries if entry not in own]

    # ---- slots

    def _slot(self, index: int) -> Slot:
        if index >= len(self._pool.slots):
            raise OrderRefused(f"there is no slot {index}: the worker has {len(self._pool.slots)}, from 0 on")
        return self._pool.slots[index]

    def _idle_slot(self, index: int) -> Slot:
        slot = self._slot(index)
        if slot.run is not None:
            raise OrderRefused(f"slot {index} is running job {slot.run.job.id}: wait for its end, or cancel it")
        return slot


def _scope_of(holder: Entry | Run) -> Scope:
    return holder.scope if isinstance(holder, Entry) else holder.job.scope


def _gone() -> OrderRefused:
    return OrderRefused("the state left the cache while it was being saved; try again")
