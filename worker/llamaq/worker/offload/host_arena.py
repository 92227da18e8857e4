"""Host memory for saved cells, allocated and filled with zeros before it is needed.

The first write to a new page waits until the system provides and clears the page. A copy into new memory therefore
takes many times as long (measured for 0.5 MB: 1.5 ms instead of 0.09 ms). The engine thread must not wait for this. So
a background thread allocates slabs before they are needed, and buffers are reused. Slabs use huge pages if the system
has them.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from llamaq.worker.offload.single_thread_executor import BackgroundThread

PAGE_BYTES = 4096
SLAB_BYTES = 64 * 2**20
MIN_FREE_BUFFERS = 8
"""The next slab is allocated when fewer buffers than this are free."""


class HostArena:
    """Buffers of one size, cut from slabs that are never freed.

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
        self._slab_bytes = 0
        self._free: deque[npt.NDArray[np.uint8]] = deque()
        self._thread = BackgroundThread("host-memory")
        self._is_growing = False

    def allocate(self, n_bytes: int, n_tokens: int) -> memoryview | None:
        """Return `n_bytes` of a free buffer for the cells of `n_tokens` tokens.

        None when no buffer is free, when the cells do not fit into a buffer, or when they fill less than half of it.
        The first call determines the size of all buffers.
        """
        if not self._buffer_bytes:
            self._buffer_bytes = (n_bytes * self._buffer_tokens // n_tokens // PAGE_BYTES + 2) * PAGE_BYTES
        if not self._buffer_bytes // 2 < n_bytes <= self._buffer_bytes:
            return None
        if len(self._free) < MIN_FREE_BUFFERS:
            self._grow()
        return self._make_view(self._free.popleft()).data[:n_bytes] if self._free else None

    def close(self) -> None:
        """Stop allocating slabs."""
        self._thread.close(0.0)

    def _make_view(self, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return a view of the buffer. The buffer becomes free when the view is deleted."""
        view = buffer[:]
        weakref.finalize(view, self._free.append, buffer).atexit = False
        return view

    def _grow(self) -> None:
        n_buffers = min(SLAB_BYTES, self._max_bytes - self._slab_bytes) // self._buffer_bytes
        if n_buffers > 0 and not self._is_growing:
            self._is_growing = True
            self._slab_bytes += n_buffers * self._buffer_bytes
            self._thread.submit(lambda: self._allocate_slab(n_buffers))

    def _allocate_slab(self, n_buffers: int) -> None:
        """Allocate a slab and add its buffers one by one. After a `MemoryError` the arena does not grow any more."""
        slab = np.empty((n_buffers, self._buffer_bytes), np.uint8)
        for buffer in slab:
            buffer.fill(0)  # releases the GIL
            self._free.append(buffer)
        self._is_growing = False

    def __repr__(self) -> str:
        return f"<HostArena {self._slab_bytes} bytes in buffers of {self._buffer_bytes}, {len(self._free)} free>"
