"""Splits a sequence into parts of limited size, for calls that must not be too large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def split_by_size(
    items: Iterable[T], size_of: Callable[[T], int], *, max_items: int, max_bytes: int
) -> Iterator[list[T]]:
    """Yield parts with at most `max_items` items and `max_bytes` bytes. A larger item is a part of its own."""
    part: list[T] = []
    n_bytes = 0
    for item in items:
        size = size_of(item)
        if part and (len(part) == max_items or n_bytes + size > max_bytes):
            yield part
            part, n_bytes = [], 0
        part.append(item)
        n_bytes += size
    if part:
        yield part
