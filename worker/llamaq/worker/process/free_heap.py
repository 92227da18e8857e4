"""Returns to the system the memory that the start of a worker has allocated and freed."""

from __future__ import annotations

import ctypes


def return_free_heap() -> None:
    """Return the free pages of the heap to the system, if the C library can do this (glibc).

    A worker allocates and frees several MB while it loads a vocabulary. The C library keeps such memory for later.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
