"""A slot's state in parts, and the parts as the bytes of one file.

per part: first cell 8 | cell after the last 8 | length 8 | data
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from llamaq.worker.core.kv_data import Data

_PART = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class StatePart:
    """Some cells of a state, up to `end`, after those of the part before.

    The data begins with cell `first`, perhaps one of the part before, and may go on after the end.
    """

    first: int
    end: int
    data: Data = field(repr=False)


def join_parts(parts: Iterable[StatePart]) -> bytes:
    """The parts in one."""
    pieces: list[Data] = []
    for part in parts:
        pieces += [_PART.pack(part.first, part.end, len(part.data)), part.data]
    return b"".join(pieces)


def split_parts(data: bytes, n_tokens: int) -> list[StatePart]:
    """The parts again, which share the memory of `data`; `ValueError` when they are not those of so many tokens."""
    view, at, parts, n_covered = memoryview(data), 0, [], 0
    while at < len(data):
        if len(data) - at < _PART.size:
            raise ValueError("a part has no head")
        first, end, n_bytes = _PART.unpack_from(data, at)
        at += _PART.size
        if not first <= n_covered < end or n_bytes > len(data) - at:
            raise ValueError("a part does not go on where the last one ended")
        parts.append(StatePart(first, end, view[at : at + n_bytes]))
        at += n_bytes
        n_covered = end
    if n_covered != n_tokens:
        raise ValueError(f"the parts hold {n_covered} of {n_tokens} tokens")
    return parts
