"""The format of saved sequence state: a header of llamaq, then parts as llama.cpp writes them.

llama.cpp does not validate the bytes that it reads: a wrong count or position can abort the process in
llama_state_seq_set_data, or make cells unusable until the context is freed. So this module first checks every number
that controls the reading. The keys (K) and values (V) themselves are not checked, because every bit pattern is valid.

    saved state
        magic "LQS1"; number of parts: u32
        for each part: first cell: u32; cell after the last one: u32; size of the part in bytes: u64
        the parts
    part
        magic: u32; sequence id: i32
        an attention section for each KV cache of the memory (sliding-window layers have a separate cache)
        a recurrent section, if the model has recurrent layers
    attention section
        number of streams: u32
        for each stream: number of cells: u32; then, unless this number is 0, the cells and their rows
    cell of an attention section
        position: i32; number of sequences: u32; in some models x, y and token: i32 each; sequence id: i32
    recurrent section
        number of cells: u32; for each cell: position: i32 and number of sequences: u32; then the rows
    rows
        whether V is transposed: u32; number of layers: u32
        K of each layer: data type: i32; bytes per row: u64; a row for each cell
        V of each layer: like K if V is not transposed, otherwise
            data type: i32; bytes per element: u32; elements per cell: u32; the elements
        no V in models that compute V from K

u32, i32 and u64 are unsigned and signed integers of 32 and 64 bits, little-endian.
Source: state_write in llama-kv-cache.cpp and llama-memory-recurrent.cpp.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamaq.worker.core.saved_cells import Allocate, SavedCells, no_buffer

_HEADER = struct.Struct("<4sI")
_PART = struct.Struct("<IIQ")
_MAGIC = b"LQS1"
_MAX_PARTS = 1 << 16
_MAX_SECTIONS = 4
_MAX_STREAMS = 256
_MAX_LAYERS = 4096
_INTS_PER_CELL = (3, 6)
"""Number of 32-bit integers of a cell: 3 without x, y and token, 6 with these fields."""
_FIRST_SECTION_OFFSET = 8
"""Offset of the first section in a part."""

_new_bytes: Any = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
_new_bytes.restype = ctypes.py_object


@dataclass(frozen=True, slots=True)
class StatePart:
    """The state of the cells [start, end), as llama.cpp wrote it: `n_bytes` bytes at `address`."""

    start: int
    end: int
    address: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The state of the cells [start, end) of a sequence, in consecutive parts. It keeps the memory of `data` alive."""

    data: SavedCells
    parts: tuple[StatePart, ...]

    @property
    def start(self) -> int:
        return self.parts[0].start

    @property
    def end(self) -> int:
        return self.parts[-1].end

    @classmethod
    def parse(cls, data: SavedCells, *, is_recurrent: bool) -> SequenceState | None:
        """Check the structure of saved state, and return its parts.

        Args:
            data: The saved state.
            is_recurrent: Whether the model has recurrent layers.

        Returns:
            None if the data do not have the structure that `allocate_state` and llama.cpp write.
        """
        try:
            parts = tuple(_parts(data))
        except (struct.error, ValueError):
            return None
        base = _address(data)
        whole = memoryview(data)
        for part in parts:
            offset = part.address - base
            if not _PartChecker(whole[offset : offset + part.n_bytes], part.start, part.end, is_recurrent).is_valid():
                return None
        return cls(data, parts)


def allocate_state(
    ranges: Sequence[tuple[int, int]], sizes: Sequence[int], allocate: Allocate = no_buffer
) -> tuple[SavedCells, list[int]]:
    """Allocate the memory for the state of some cells, and write the header.

    If `allocate` returns None, the memory is a new `bytes` object, which the caller fills through the addresses. This
    avoids a copy. Writing into the `bytes` object is safe, because no other code has a reference to it yet.

    Args:
        ranges: The cells [start, end) of each part.
        sizes: The number of bytes of each part.
        allocate: Provides the memory.

    Returns:
        The memory, and the address of each part in it.
    """
    header = _HEADER.pack(_MAGIC, len(sizes))
    header += b"".join(_PART.pack(*cells, size) for cells, size in zip(ranges, sizes, strict=True))
    n_bytes = len(header) + sum(sizes)
    data: SavedCells | None = allocate(n_bytes)
    if data is None:
        data = _new_bytes(None, n_bytes)
    address = _address(data)
    ctypes.memmove(address, header, len(header))
    addresses = address + len(header) + np.cumsum([0, *sizes[:-1]])
    return data, addresses.tolist()


def _address(data: SavedCells) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data


def _parts(data: SavedCells) -> Iterator[StatePart]:
    magic, n_parts = _HEADER.unpack_from(data)
    if magic != _MAGIC or not 1 <= n_parts <= _MAX_PARTS:
        raise ValueError("not a saved state")
    address, offset, last = _address(data), _HEADER.size + n_parts * _PART.size, None
    for n in range(n_parts):
        start, end, n_bytes = _PART.unpack_from(data, _HEADER.size + n * _PART.size)
        if not start < end <= np.iinfo(np.int32).max or last not in (None, start):
            raise ValueError("the parts are not consecutive")
        yield StatePart(start, end, address + offset, n_bytes)
        offset, last = offset + n_bytes, end
    if offset != len(data):
        raise ValueError("the parts do not fill the data")


class _PartChecker:
    """Checks the structure of one part, given its bytes and its cells [start, end)."""

    def __init__(self, data: memoryview, start: int, end: int, is_recurrent: bool) -> None:
        self._data = data
        self._start, self._end = start, end
        self._is_recurrent = is_recurrent

    def is_valid(self) -> bool:
        try:
            return self._has_sections(_FIRST_SECTION_OFFSET, _MAX_SECTIONS)
        except (struct.error, ValueError):
            return False

    def _has_sections(self, offset: int, n_left: int) -> bool:
        """Return whether the bytes from `offset` to the end are at most `n_left` valid sections.

        The end of a section depends on whether the section contains V. The format does not store whether it does, so
        both possible ends are tried.
        """
        if self._is_recurrent and self._has_recurrent_section(offset):
            return True
        if offset == len(self._data):
            return offset > _FIRST_SECTION_OFFSET and not self._is_recurrent
        return n_left > 0 and any(self._has_sections(end, n_left - 1) for end in self._attention_ends(offset))

    def _has_recurrent_section(self, offset: int) -> bool:
        return offset + 12 <= len(self._data) and self._ints(offset, 3) == (1, self._end - 1, 0)

    def _attention_ends(self, offset: int) -> set[int]:
        """Return the possible ends of an attention section at `offset`."""
        [n_streams] = self._ints(offset, 1)
        if not 1 <= n_streams <= _MAX_STREAMS:
            return set()
        ends = {offset + 4}
        for _ in range(n_streams):
            ends = {after for end in ends if end + 4 <= len(self._data) for after in self._stream_ends(end)}
        return ends

    def _stream_ends(self, offset: int) -> set[int]:
        """Return the possible ends of a stream at `offset`."""
        [n_cells] = self._ints(offset, 1)
        if n_cells == 0:
            return {offset + 4}
        if not 1 <= n_cells <= self._end - self._start:
            return set()
        for n_ints in _INTS_PER_CELL:
            rows = offset + 4 + n_cells * n_ints * 4
            if rows <= len(self._data) and self._has_cells(offset + 4, n_cells, n_ints):
                return set(self._rows_ends(rows, n_cells))
        return set()

    def _has_cells(self, offset: int, n_cells: int, n_ints: int) -> bool:
        """Return whether the last `n_cells` cells of the part are at `offset`, in any order, each in one sequence."""
        cells = np.frombuffer(self._data, "<i4", n_cells * n_ints, offset).reshape(n_cells, n_ints)
        positions = np.sort(cells[:, 0])
        return bool((cells[:, 1] == 1).all() and (positions == np.arange(self._end - n_cells, self._end)).all())

    def _rows_ends(self, offset: int, n_cells: int) -> Iterator[int]:
        """Yield the possible ends of the rows at `offset`: without V, then with V."""
        is_transposed, n_layers = self._ints(offset, 2)
        if is_transposed not in (0, 1) or not 1 <= n_layers <= _MAX_LAYERS:
            return
        offset += 8
        for _ in range(n_layers):
            offset = self._after_rows(offset, n_cells)
        yield offset
        with suppress(struct.error, ValueError):  # the bytes after K are not V
            for _ in range(n_layers):
                offset = self._after_elements(offset, n_cells) if is_transposed else self._after_rows(offset, n_cells)
            yield offset

    def _after_rows(self, offset: int, n_cells: int) -> int:
        _, row = struct.unpack_from("<iQ", self._data, offset)
        return self._within(offset + 12 + n_cells * row)

    def _after_elements(self, offset: int, n_cells: int) -> int:
        _, size, n = struct.unpack_from("<iII", self._data, offset)
        return self._within(offset + 12 + n_cells * size * n)

    def _within(self, offset: int) -> int:
        if offset > len(self._data):
            raise ValueError("the rows exceed the part")
        return offset

    def _ints(self, offset: int, n: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{n}i", self._data, offset)
