"""The parts of a slot's saved state, and their encoding as the bytes of one file.

Encoding of a part, with sizes in bytes: first cell (8), end cell (8), length of the data (8), data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from llamaq.worker.core.saved_cells import SavedCells

_PART = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class SlotStatePart:
    """The cells of a state from the end of the previous part up to `end`.

    The data may contain further cells: it begins with cell `first` and may extend beyond `end`.
    """

    first: int
    """The first cell of the data. It is at or before the end of the previous part."""
    end: int
    data: SavedCells = field(repr=False)


def join_parts(parts: Iterable[SlotStatePart]) -> bytes:
    """Encode the parts as one byte string."""
    pieces: list[SavedCells] = []
    for part in parts:
        pieces += [_PART.pack(part.first, part.end, len(part.data)), part.data]
    return b"".join(pieces)


def split_parts(data: bytes, n_tokens: int) -> list[SlotStatePart]:
    """Decode the parts of a state. The parts are views of `data`.

    Args:
        data: The result of `join_parts`.
        n_tokens: Length of the state in tokens.

    Raises:
        ValueError: The data is damaged, or is not a state of `n_tokens` tokens.
    """
    view, at, parts, n_covered = memoryview(data), 0, [], 0
    while at < len(data):
        if len(data) - at < _PART.size:
            raise ValueError("a part has no complete header")
        first, end, n_bytes = _PART.unpack_from(data, at)
        at += _PART.size
        if not first <= n_covered < end or n_bytes > len(data) - at:
            raise ValueError("a part does not start at the end of the previous part")
        parts.append(SlotStatePart(first, end, view[at : at + n_bytes]))
        at += n_bytes
        n_covered = end
    if n_covered != n_tokens:
        raise ValueError(f"the parts contain {n_covered} of {n_tokens} tokens")
    return parts
