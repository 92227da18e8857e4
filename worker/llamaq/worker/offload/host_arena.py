"""Memory for saved cells that is there before it is needed.

Whoever first touches fresh memory waits for the system to find and clear it. Page by page that took many times as long
as the copy that went there (0.5 MB: 1.5 ms instead of 0.09), and it was the engine thread that waited. Here a thread of
its own lays out slabs ahead, in huge pages where the system has them, and what was given back is used again.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from llamaq.worker.offload.background_thread import BackgroundThread

PAGE = 4096
SLAB_BYTES = 64 * 2**20
N_AHEAD = 8
"""With fewer slots left than these the next slab is laid out."""


class HostArena:
    """Slots of one size, in slabs that are never given back. `take` is for one thread; slots come back from any."""

    def __init__(self, max_bytes: int, slot_tokens: int) -> None:
        """All slabs together take at most `max_bytes`. A slot is for the cells of so many tokens."""
        self._max_bytes = max_bytes
        self._slot_tokens = slot_tokens
        self._slot_bytes = 0  # known when the first cells are saved
        self._slab_bytes = 0
        self._free: deque[npt.NDArray[np.uint8]] = deque()
        self._thread = BackgroundThread("host-memory")
        self._is_growing = False

    def take(self, n_bytes: int, n_tokens: int) -> memoryview | None:
        """Memory for the cells of so many tokens; it comes back when nobody refers to it any more.

        None when none is ready, or the slot would be left half empty.
        """
        if not self._slot_bytes:
            self._slot_bytes = (n_bytes * self._slot_tokens // n_tokens // PAGE + 2) * PAGE
        if not self._slot_bytes // 2 < n_bytes <= self._slot_bytes:
            return None
        if len(self._free) < N_AHEAD:
            self._grow()
        return self._lend(self._free.popleft()).data[:n_bytes] if self._free else None

    def close(self) -> None:
        """Lay out no more."""
        self._thread.close(0.0)

    def _lend(self, slot: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The slot as an object of its own, whose end brings the slot back."""
        lent = slot[:]
        weakref.finalize(lent, self._free.append, slot).atexit = False
        return lent

    def _grow(self) -> None:
        n_slots = min(SLAB_BYTES, self._max_bytes - self._slab_bytes) // self._slot_bytes
        if n_slots > 0 and not self._is_growing:
            self._is_growing = True
            self._slab_bytes += n_slots * self._slot_bytes
            self._thread.submit(lambda: self._lay_out(n_slots))

    def _lay_out(self, n_slots: int) -> None:
        """Add slots one by one as they are there. A `MemoryError` here ends all growing."""
        slab = np.empty((n_slots, self._slot_bytes), np.uint8)
        for slot in slab:
            slot.fill(0)  # without the interpreter's lock
            self._free.append(slot)
        self._is_growing = False

    def __repr__(self) -> str:
        return f"<HostArena {self._slab_bytes} bytes in slots of {self._slot_bytes}, {len(self._free)} free>"
