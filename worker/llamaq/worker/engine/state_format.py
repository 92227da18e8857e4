"""The bytes of saved cells: a header of ours, then parts as llama.cpp writes them.

llama.cpp reads such bytes trustingly: a count or a position that is wrong can end the process or lose cells for good.
So what steers it is checked before, down to the rows of numbers, of which every pattern is valid.

    header   "LQS1", parts: u32; per part: first cell, cell after the last: u32, bytes: u64
    part     magic: u32, sequence: i32, sections
    section  attention (one for each of the caches that a memory consists of, such as that of windows):
                 streams: u32; per stream: cells: u32, and where there are some, per cell: position: i32,
                 sequences: u32, (x, y, token: i32 each, in some models), sequence: i32; then rows
             recurrent (last, if at all): cells: u32; per cell: position: i32, sequences: u32; then rows
    rows     V is transposed: u32, layers: u32; K of each layer: type: i32, row: u64, a row per cell; V of each layer
             the same, or, transposed: type: i32, element: u32, elements: u32, that many elements per cell;
             no V at all where it is computed from K

Numbers are little-endian. Source: state_write in llama-kv-cache.cpp and llama-memory-recurrent.cpp.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamaq.worker.core.kv_data import Allocate, Data, no_buffer

_HEADER = struct.Struct("<4sI")
_PART = struct.Struct("<IIQ")
_MAGIC = b"LQS1"
_MAX_PARTS = 1 << 16
_MAX_SECTIONS = 4
_MAX_STREAMS = 256
_MAX_LAYERS = 4096
_INTS_PER_CELL = (3, 6)

_new_bytes: Any = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
_new_bytes.restype = ctypes.py_object


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What llama.cpp wrote of the cells [start, end): `n_bytes` at an address."""

    start: int
    end: int
    address: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """Saved cells [start, end), in parts that follow one another. Its addresses are those of `data`."""

    data: Data
    parts: tuple[SavedPart, ...]

    @property
    def start(self) -> int:
        return self.parts[0].start

    @property
    def end(self) -> int:
        return self.parts[-1].end

    @classmethod
    def parse(cls, data: Data, *, is_recurrent: bool) -> SavedState | None:
        """None when they are not what `allot` and llama.cpp made of a memory with or without recurrent layers."""
        try:
            parts = tuple(_parts(data))
        except (struct.error, ValueError):
            return None
        base = _address(data)
        whole = memoryview(data)
        for part in parts:
            at = part.address - base
            if not _Part(whole[at : at + part.n_bytes], part.start, part.end, is_recurrent).is_sound():
                return None
        return cls(data, parts)


def allot(
    borders: Sequence[tuple[int, int]], sizes: Sequence[int], allocate: Allocate = no_buffer
) -> tuple[Data, list[int]]:
    """Memory with the header of parts of these cells and sizes, and the addresses that the parts are to be written to.

    Bytes are made where there is none to be had. They are written in place, though bytes never change: nobody else has
    them yet, and a copy would cost as much again.
    """
    header = _HEADER.pack(_MAGIC, len(sizes))
    header += b"".join(_PART.pack(*border, size) for border, size in zip(borders, sizes, strict=True))
    n_bytes = len(header) + sum(sizes)
    data: Data | None = allocate(n_bytes)
    if data is None:
        data = _new_bytes(None, n_bytes)
    address = _address(data)
    ctypes.memmove(address, header, len(header))
    addresses = address + len(header) + np.cumsum([0, *sizes[:-1]])
    return data, addresses.tolist()


def _address(data: Data) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data


def _parts(data: Data) -> Iterator[SavedPart]:
    magic, n_parts = _HEADER.unpack_from(data)
    if magic != _MAGIC or not 1 <= n_parts <= _MAX_PARTS:
        raise ValueError("no saved cells")
    address, offset, last = _address(data), _HEADER.size + n_parts * _PART.size, None
    for n in range(n_parts):
        start, end, n_bytes = _PART.unpack_from(data, _HEADER.size + n * _PART.size)
        if not start < end <= np.iinfo(np.int32).max or last not in (None, start):
            raise ValueError("parts do not follow one another")
        yield SavedPart(start, end, address + offset, n_bytes)
        offset, last = offset + n_bytes, end
    if offset != len(data):
        raise ValueError("the parts do not fill the data")


class _Part:
    """One part, to be checked."""

    def __init__(self, data: memoryview, start: int, end: int, is_recurrent: bool) -> None:
        self._data = data
        self._start, self._end = start, end
        self._is_recurrent = is_recurrent

    def is_sound(self) -> bool:
        try:
            return self._are_sections(8, _MAX_SECTIONS)
        except (struct.error, ValueError):
            return False

    def _are_sections(self, at: int, n_left: int) -> bool:
        """Whether sections go from here to the end. Where one ends depends on whether it has V, so both are tried."""
        if self._is_recurrent and self._is_recurrent_section(at):
            return True
        if at == len(self._data):
            return at > 8 and not self._is_recurrent
        return n_left > 0 and any(self._are_sections(end, n_left - 1) for end in self._attention_ends(at))

    def _is_recurrent_section(self, at: int) -> bool:
        return at + 12 <= len(self._data) and self._ints(at, 3) == (1, self._end - 1, 0)

    def _attention_ends(self, at: int) -> set[int]:
        [n_streams] = self._ints(at, 1)
        if not 1 <= n_streams <= _MAX_STREAMS:
            return set()
        ends = {at + 4}
        for _ in range(n_streams):
            ends = {after for end in ends if end + 4 <= len(self._data) for after in self._stream_ends(end)}
        return ends

    def _stream_ends(self, at: int) -> set[int]:
        [n_cells] = self._ints(at, 1)
        if n_cells == 0:
            return {at + 4}
        if not 1 <= n_cells <= self._end - self._start:
            return set()
        for n_ints in _INTS_PER_CELL:
            rows = at + 4 + n_cells * n_ints * 4
            if rows <= len(self._data) and self._are_cells(at + 4, n_cells, n_ints):
                return set(self._rows_ends(rows, n_cells))
        return set()

    def _are_cells(self, at: int, n_cells: int, n_ints: int) -> bool:
        """Whether these are the last of the cells, in any order, each of one sequence."""
        cells = np.frombuffer(self._data, "<i4", n_cells * n_ints, at).reshape(n_cells, n_ints)
        positions = np.sort(cells[:, 0])
        return bool((cells[:, 1] == 1).all() and (positions == np.arange(self._end - n_cells, self._end)).all())

    def _rows_ends(self, at: int, n_cells: int) -> Iterator[int]:
        is_transposed, n_layers = self._ints(at, 2)
        if is_transposed not in (0, 1) or not 1 <= n_layers <= _MAX_LAYERS:
            return
        at += 8
        for _ in range(n_layers):
            at = self._after_rows(at, n_cells)
        yield at
        with suppress(struct.error, ValueError):  # no V
            for _ in range(n_layers):
                at = self._after_elements(at, n_cells) if is_transposed else self._after_rows(at, n_cells)
            yield at

    def _after_rows(self, at: int, n_cells: int) -> int:
        _, row = struct.unpack_from("<iQ", self._data, at)
        return self._within(at + 12 + n_cells * row)

    def _after_elements(self, at: int, n_cells: int) -> int:
        _, size, n = struct.unpack_from("<iII", self._data, at)
        return self._within(at + 12 + n_cells * size * n)

    def _within(self, at: int) -> int:
        if at > len(self._data):
            raise ValueError("rows go on after the end")
        return at

    def _ints(self, at: int, n: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{n}i", self._data, at)
