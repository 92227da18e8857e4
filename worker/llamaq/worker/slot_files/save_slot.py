"""The state of a slot is read out: from its sequence, from kept ones, from host memory and from disk.

It goes in steps of a few milliseconds, a block of tokens at least, on the engine thread between ticks. Between two
steps anything may happen: the job goes on and leaves, entries move between the tiers. Where memory is not saved in
parts, a state is one block, and ticks wait for as long as its copy takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from llamaq.common.errors import EngineError, SlotCommandRefused
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.kv_data import Data
from llamaq.worker.core.sequence_ops import SlotStateOps
from llamaq.worker.core.slot import Run, Slot
from llamaq.worker.core.tokens import TOKEN_BYTES
from llamaq.worker.kv_cache.kv_memory import KvMemory
from llamaq.worker.kv_cache.offload_interface import Offload
from llamaq.worker.kv_cache.prefix_cache import Entry
from llamaq.worker.offload.block_transfers import BLOCK_TOKENS
from llamaq.worker.slot_files.state_parts import StatePart

STEP_S = 0.005
"""A step begins no further block after this."""


@dataclass(slots=True, eq=False)
class SlotSave:
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

    def take(self, data: Data | None) -> None:
        """What was waited for has come; raises `SlotCommandRefused` when it has gone."""
        if data is None:
            raise _gone()
        self.parts.append(StatePart(*self.coming, data))


class SlotSaver:
    """Reads the states of slots. `SlotCommandRefused` says why something cannot be read."""

    def __init__(
        self, memory: KvMemory, mover: SlotStateOps, tiers: Offload, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._memory = memory
        self._mover = mover
        self._tiers = tiers
        self._clock = clock

    def begin(self, slot: Slot) -> SlotSave:
        """Begin to read the state of the job that runs in the slot, or of the one that ran there last."""
        run = slot.run
        if run is not None:
            save = SlotSave(run.packed_history(run.n_past), run.job.scope, run)
        else:
            n_tokens = self._n_there(slot.content, slot.scope)
            save = SlotSave(slot.content[: n_tokens * TOKEN_BYTES], slot.scope)
        if not save.tokens:
            raise SlotCommandRefused(
                f"slot {slot.index} has no state: nothing has run there, or the cache has given it up"
            )
        if run is not None and not self._mover.in_blocks:
            self._read_from_device(save)  # now: after the next tick it holds more, and cannot be read in part
        return save

    def step(self, save: SlotSave) -> Future[Data | None] | None:
        """Go on save. The next part may have to come from disk: then it is to be waited for, and taken."""
        until_s = self._clock() + STEP_S
        while not save.is_complete:
            if not self._read_from_device(save):
                data = self._read_from_tiers(save)
                if not data.done():
                    return data
                save.take(data.result())
            if self._clock() >= until_s:
                break
        return None

    def _n_there(self, tokens: bytes, scope: Scope) -> int:
        """How many of the tokens have cells, on the device or behind it."""
        stored = self._tiers.match(tokens, scope)
        holder, n_held = self._holder(tokens, scope)
        return max(n_held if holder else 0, stored.n_tokens if stored else 0)

    def _holder(self, tokens: bytes, scope: Scope) -> tuple[Entry | Run | None, int]:
        """Who on the device has the longest beginning of these tokens, and how many of them."""
        found = self._memory.cache.match(tokens, scope)
        if found.source and not self._mover.in_blocks and _scope_of(found.source).key != scope.key:
            return None, 0  # all of it would be saved, with what is no business of this scope
        return found.source, found.n_tokens

    def _read_from_device(self, save: SlotSave) -> bool:
        run = save.run
        if run is not None and not run.is_released and run.n_past > save.n_read:
            source: Entry | Run | None = run
            n_held = min(run.n_past, save.n_tokens)
        else:
            source, n_held = self._holder(save.tokens, save.scope)
        start, end = save.n_read, n_held
        if source is None or end <= start:
            return False
        if self._mover.in_blocks:
            saved_end = end = min(end, (start // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        elif end < save.n_tokens:
            return False
        else:
            saved_end = source.n_past if isinstance(source, Run) else source.n_tokens
        try:
            save.parts.append(StatePart(start, end, self._mover.save(source.seq_id, start, saved_end)))
        except EngineError as exc:
            raise SlotCommandRefused(f"the state could not be read: {exc}") from exc
        return True

    def _read_from_tiers(self, save: SlotSave) -> Future[Data | None]:
        stored = self._tiers.match(save.tokens, save.scope)
        for block in stored.blocks if stored else ():
            end = min(block.end, save.n_tokens)
            if block.start <= save.n_read < end:
                save.coming = (block.start, end)
                return self._tiers.read_block(block)
        raise _gone()


def _scope_of(holder: Entry | Run) -> Scope:
    return holder.scope if isinstance(holder, Entry) else holder.job.scope


def _gone() -> SlotCommandRefused:
    return SlotCommandRefused("the state left the cache while it was being saved; try again")
