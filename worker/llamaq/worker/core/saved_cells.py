"""The saved state of KV cells as bytes."""

from __future__ import annotations

from collections.abc import Callable

SavedCells = bytes | memoryview
"""Saved cells: a `bytes` object, or a view of a buffer from `Allocate`. The bytes never change after the save."""

Allocate = Callable[[int], memoryview | None]
"""Lends a buffer of the given number of bytes. None means that no buffer is ready."""


def no_buffer(_: int) -> None:
    """Lend no buffer. The cells are then saved as a `bytes` object."""


def footprint(data: SavedCells) -> int:
    """Return the bytes of memory that the data occupy. A view of a lent buffer occupies the whole buffer."""
    return memoryview(data.obj).nbytes if isinstance(data, memoryview) else len(data)
