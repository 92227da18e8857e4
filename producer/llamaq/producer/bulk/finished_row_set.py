"""Stores which rows of a run have an answer or an error, with one bit for each row."""

from __future__ import annotations


class FinishedRows:
    """A set of row numbers. A million rows take 125 KB."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<FinishedRows {self._count}>"

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] & (1 << (number & 7)))

    def add(self, number: int) -> None:
        """Add a row."""
        if number in self:
            return
        place = number >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        self._bits[place] |= 1 << (number & 7)
        self._count += 1
