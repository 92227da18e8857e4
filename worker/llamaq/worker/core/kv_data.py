"""Saved cells as bytes, in memory of their own or in memory that is lent."""

from __future__ import annotations

from collections.abc import Callable

Data = bytes | memoryview
"""Saved cells; nobody changes them once they are there."""

Allocate = Callable[[int], memoryview | None]
"""Lends memory for so many bytes; None: there is none ready."""


def nothing_ready(_: int) -> None:
    """Have memory of its own taken."""


def footprint(data: Data) -> int:
    """How many bytes of memory the data take: of what was lent all, however much of it they fill."""
    return memoryview(data.obj).nbytes if isinstance(data, memoryview) else len(data)
