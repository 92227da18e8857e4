"""Host memory for saved cells, allocated and filled with zeros before it is needed.

The first write to a new page waits until the system provides and clears the page. A copy into new memory therefore
takes many times as long (measured for 0.5 MB: 1.5 ms instead of 0.09 ms). The engine thread must not wait for this. So
a background thread allocates slabs before they are needed, and buffers are reused. Slabs use huge pages if the system
has them.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llamaq.worker.offload.background_thread import BackgroundThread

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
SLAB_BYTES = 64 * 2**20
MIN_FREE_BUFFERS = 8
"""The next slab is allocated when fewer buffers than this are free. A slab without a used buffer is freed when more
buffers than this are free in the other slabs."""


@dataclass(slots=True, eq=False)
class _Slab:
    """Memory that is allocated at once."""

    n_buffers: int
    n_bytes: int
    free: deque[npt.NDArray[np.uint8]] = field(default_factory=deque)
    """The buffers that are not used, as far as they were filled with zeros."""

    @property
    def is_unused(self) -> bool:
        return len(self.free) == self.n_buffers


class HostArena:
    """Buffers of one size, cut from slabs.

    One thread calls `allocate`. A buffer becomes free when its last reference is deleted, in any thread.
    """

    def __init__(self, max_bytes: int, buffer_tokens: int) -> None:
        """Create an arena without a slab.

        Args:
            max_bytes: Upper bound on the size of all slabs together, in bytes.
            buffer_tokens: Number of tokens whose cells fit into one buffer.
        """
        self._max_bytes = max_bytes
        self._buffer_tokens = buffer_tokens
        self._buffer_bytes = 0  # unknown until the first allocation
        self._slabs: list[_Slab] = []
        """The oldest first. Their buffers are used first, so that the others can be freed."""
        self._thread = BackgroundThread("host-memory")
        self._is_growing = False

    @property
    def n_bytes(self) -> int:
        """The size of all slabs together, in bytes."""
        return sum([slab.n_bytes for slab in self._slabs])

    def allocate(self, n_bytes: int, n_tokens: int) -> memoryview | None:
        """Return `n_bytes` of a free buffer for the cells of `n_tokens` tokens.

        None when no buffer is free, when the cells do not fit into a buffer, or when they fill less than half of it.
        The first call determines the size of all buffers.
        """
        if not self._buffer_bytes:
            self._buffer_bytes = (n_bytes * self._buffer_tokens // n_tokens // PAGE_BYTES + 2) * PAGE_BYTES
        n_free = sum([len(slab.free) for slab in self._slabs])
        self._free_slab(n_free)
        if not self._buffer_bytes // 2 < n_bytes <= self._buffer_bytes:
            return None
        if n_free < MIN_FREE_BUFFERS:
            self._grow()
        slab = next((slab for slab in self._slabs if slab.free), None)
        return None if slab is None else self._make_view(slab).data[:n_bytes]

    def close(self) -> None:
        """Stop allocating slabs."""
        self._thread.close(0.0)

    def _make_view(self, slab: _Slab) -> npt.NDArray[np.uint8]:
        """Return a view of a free buffer. The buffer becomes free again when the view is deleted."""
        buffer = slab.free.popleft()
        view = buffer[:]
        weakref.finalize(view, slab.free.append, buffer).atexit = False
        return view

    def _free_slab(self, n_free: int) -> None:
        """Free a slab without a used buffer, if enough buffers are free in the others.

        After a change from long prompts to short ones, which need no buffers, the cells would otherwise take up to
        twice the memory.
        """
        unused = next((slab for slab in reversed(self._slabs) if slab.is_unused), None)
        if unused is not None and n_free - unused.n_buffers > MIN_FREE_BUFFERS:
            self._slabs.remove(unused)

    def _grow(self) -> None:
        n_buffers = min(SLAB_BYTES, self._max_bytes - self.n_bytes) // self._buffer_bytes
        if n_buffers > 0 and not self._is_growing:
            self._is_growing = True
            self._thread.submit(lambda: self._allocate_slab(n_buffers))

    def _allocate_slab(self, n_buffers: int) -> None:
        """Allocate a slab and add its buffers one by one. After a `MemoryError` the arena does not grow any more."""
        try:
            memory = np.empty((n_buffers, self._buffer_bytes), np.uint8)
        except MemoryError:  # `_is_growing` stays set, so that nothing tries it again
            log.warning("cache.host_memory_exhausted bytes=%d: the cache in host memory does not grow", self.n_bytes)
            return
        slab = _Slab(n_buffers, memory.nbytes)
        self._slabs.append(slab)
        for buffer in memory:
            buffer.fill(0)  # releases the GIL
            slab.free.append(buffer)
        self._is_growing = False

    def __repr__(self) -> str:
        n_free = sum(len(slab.free) for slab in self._slabs)
        return f"<HostArena {self.n_bytes} bytes in buffers of {self._buffer_bytes}, {n_free} free>"
