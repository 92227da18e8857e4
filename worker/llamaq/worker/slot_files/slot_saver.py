"""Saves the state of a slot: collects its cells from the slot's sequence, cached entries, host memory and disk.

A save runs on the engine thread between ticks. A step takes a few milliseconds and reads at least one block. Between
two steps the job may continue or end, and entries may move between the tiers. Therefore every step searches for the
next cells again. If sequences cannot be saved in parts, a state has one part, and the ticks wait for the whole copy.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from llamaq.common.errors import EngineError, SlotCommandRefused
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.packed_tokens import TOKEN_BYTES
from llamaq.worker.core.saved_cells import SavedCells
from llamaq.worker.core.sequence_interface import SlotStateOps
from llamaq.worker.core.slot import Run, Slot
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache_interface import CachedSequence
from llamaq.worker.offload.block_transfers import BLOCK_TOKENS
from llamaq.worker.slot_files.slot_state_parts import SlotStatePart

STEP_S = 0.005
"""A step that has run for this time starts no further part."""


@dataclass(slots=True, eq=False)
class SlotSave:
    """A save in progress: the tokens of the state, and the parts that have been read."""

    tokens: bytes
    """Packed tokens of the state."""
    scope: Scope
    run: Run | None = None
    """The job that ran in the slot when the save began."""
    parts: list[SlotStatePart] = field(default_factory=list)
    awaited_span: tuple[int, int] = (0, 0)
    """First cell, and cell after the last one, of the part that is being read from disk."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def n_read(self) -> int:
        """Number of tokens of the state that have been read."""
        return self.parts[-1].end if self.parts else 0

    @property
    def is_complete(self) -> bool:
        return self.n_read == self.n_tokens

    def add_awaited_part(self, data: SavedCells | None) -> None:
        """Add the part that was read from disk. Raises `SlotCommandRefused` when `data` is None (invalid file)."""
        if data is None:
            raise _evicted_error()
        self.parts.append(SlotStatePart(*self.awaited_span, data))


class SlotSaver:
    """Reads the states of slots. The message of a `SlotCommandRefused` is sent to the client."""

    def __init__(self, memory: KvMemory, sequences: SlotStateOps, offload: Offload, clock: Callable[[], float]) -> None:
        """See `SlotOperations` for the parameters."""
        self._memory = memory
        self._sequences = sequences
        self._offload = offload
        self._clock = clock

    def begin(self, slot: Slot) -> SlotSave:
        """Start saving the state of the job that runs in the slot, or of the last job that ran in it.

        Raises:
            SlotCommandRefused: The slot has no state, or the engine cannot read it.
        """
        self._memory.stop_saving_ahead()
        run = slot.run
        if run is not None:
            save = SlotSave(run.packed_history(run.n_past), run.job.scope, run)
        else:
            n_tokens = self._n_available(slot.content, slot.scope)
            save = SlotSave(slot.content[: n_tokens * TOKEN_BYTES], slot.scope)
        if not save.tokens:
            raise SlotCommandRefused(
                f"slot {slot.index} has no state: no job has run there, or the cache has evicted its state"
            )
        if run is not None and not self._sequences.can_save_parts:
            self._read_from_device(save)  # before the next tick adds tokens, which cannot be removed again
        return save

    def step(self, save: SlotSave) -> Future[SavedCells | None] | None:
        """Read parts for about `STEP_S`.

        Returns:
            A future when the next part is read from disk. The caller waits for it and calls `save.add_awaited_part`
            with its result before the next step. None otherwise.

        Raises:
            SlotCommandRefused: A part was evicted from all tiers, or the engine cannot read it.
        """
        self._memory.stop_saving_ahead()
        deadline_s = self._clock() + STEP_S
        while not save.is_complete:
            if not self._read_from_device(save):
                data = self._read_from_offload(save)
                if not data.done():
                    return data
                save.add_awaited_part(data.result())
            if self._clock() >= deadline_s:
                break
        return None

    def _n_available(self, tokens: bytes, scope: Scope) -> int:
        """Return the length of the longest prefix of `tokens` that is on the device or in the offload tiers."""
        stored = self._offload.match(tokens, scope)
        source, n_held = self._find_on_device(tokens, scope)
        return max(n_held if source else 0, stored.n_tokens if stored else 0)

    def _find_on_device(self, tokens: bytes, scope: Scope) -> tuple[CachedSequence | Run | None, int]:
        """Return the entry or run with the longest prefix of `tokens`, and the length of that prefix."""
        match = self._memory.entries.match(tokens, scope)
        if match.source and not self._sequences.can_save_parts:  # the sequence can only be saved as a whole
            is_foreign = _scope_of(match.source).key != scope.key  # it contains tokens of another namespace
            is_longer = _n_tokens_of(match.source) > match.n_held
            if is_foreign or (is_longer and not self._sequences.can_cut_saved):
                return None, 0
        return match.source, match.n_held

    def _read_from_device(self, save: SlotSave) -> bool:
        """Read the next part from a sequence on the device. False when no sequence contains the next part."""
        run = save.run
        if run is not None and not run.is_released and run.n_past > save.n_read:
            source: CachedSequence | Run | None = run
            n_held = min(run.n_past, save.n_tokens)
        else:
            source, n_held = self._find_on_device(save.tokens, save.scope)
        start, end = save.n_read, n_held
        if source is None or end <= start:
            return False
        if self._sequences.can_save_parts:
            saved_end = end = min(end, (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        elif end < save.n_tokens:
            return False
        else:
            saved_end = _n_tokens_of(source)
        try:
            save.parts.append(SlotStatePart(start, end, self._sequences.save(source.seq_id, start, saved_end)))
        except EngineError as exc:
            raise SlotCommandRefused(f"the engine cannot read the state: {exc}") from exc
        return True

    def _read_from_offload(self, save: SlotSave) -> Future[SavedCells | None]:
        """Start reading the next part from host memory or disk. Raises `SlotCommandRefused` if neither has it."""
        stored = self._offload.match(save.tokens, save.scope)
        for block in stored.blocks if stored else ():
            end = min(block.end, save.n_tokens)
            if block.start <= save.n_read < end:
                save.awaited_span = (block.start, end)
                return self._offload.read_block(block)
        raise _evicted_error()


def _n_tokens_of(source: CachedSequence | Run) -> int:
    return source.n_tokens if isinstance(source, CachedSequence) else source.n_past


def _scope_of(source: CachedSequence | Run) -> Scope:
    return source.scope if isinstance(source, CachedSequence) else source.job.scope


def _evicted_error() -> SlotCommandRefused:
    return SlotCommandRefused("the state left the cache while it was being saved; try again")
