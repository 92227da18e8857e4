"""KV memory without llama.cpp. Each cell is an object with its token, so that every wrong use of a cell is found.

It has the engine's operations on sequences, with stricter checks: for a call that can only result from a defect, it
raises `AssertionError`. The engine returns 0 or False for such a call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from llamaq.common.errors import EngineError
from llamaq.worker.core.saved_cells import Allocate, SavedCells, no_buffer

_HEADER = struct.Struct("<4sII")
_MAGIC = b"fake"


@dataclass(slots=True, eq=False)
class FakeCell:
    """The keys and values of one token. Sequences that share the cell hold the same object."""

    token: int
    n_holders: int = 0


class FakeMemory:
    """The cells of all sequences.

    Args:
        n_ctx: Number of KV cells.
        n_seq_max: Number of sequences. If sequences can be saved in parts, callers cannot use the last sequence, which
            is the scratch sequence of the real engine.
        can_cut: Whether a sequence can be cut and copied in part. False behaves like a recurrent model.
        kv_unified: Whether all sequences share one pool of cells. Otherwise each sequence has `n_ctx / n_seq_max` cells
            of its own, and a copy shares none.
    """

    def __init__(self, *, n_ctx: int, n_seq_max: int, can_cut: bool, kv_unified: bool) -> None:
        self.n_ctx = n_ctx
        self.n_seq_max = n_seq_max
        self.can_cut = self.can_cut_saved = self.can_remove_draft = can_cut
        self.kv_unified = kv_unified
        self.can_save_parts = can_cut and kv_unified
        self.n_sequences = n_seq_max - 1 if self.can_save_parts else n_seq_max
        self.cells_per_sequence = n_ctx if kv_unified else n_ctx // n_seq_max
        self.calls: list[tuple[str, int, int, int]] = []
        """All copies (source, target, tokens), saves and loads (sequence, start, end), in order."""
        self.used_cells = 0
        """Number of cells in use. A cell that several sequences share counts once."""
        self.is_spoiled = False
        """Whether the data of a cell, used or free, are not numbers."""
        self._cells: dict[int, list[FakeCell]] = {}
        self._bad_saves = 0
        self._bad_loads = 0

    @property
    def memory(self) -> dict[int, list[int]]:
        """Maps each sequence that is not empty to the tokens whose cells it holds."""
        return {seq_id: self.tokens(seq_id) for seq_id, cells in self._cells.items() if cells}

    def tokens(self, seq_id: int) -> list[int]:
        """Return the tokens whose cells the sequence holds."""
        return [cell.token for cell in self._cells.get(seq_id, ())]

    def n_held(self, seq_id: int) -> int:
        """Return the number of cells of one sequence, including shared cells."""
        self._check_id(seq_id)
        return len(self._cells.get(seq_id, ()))

    def has_room(self, seq_id: int, n_tokens: int) -> bool:
        """Whether `n_tokens` cells can be added to the sequence."""
        if self.kv_unified:
            return self.used_cells + n_tokens <= self.n_ctx
        return self.n_held(seq_id) + n_tokens <= self.cells_per_sequence

    def append(self, seq_id: int, tokens: Iterable[int]) -> None:
        """Add a cell for each token. Raises `AssertionError` when there are not enough cells."""
        new = [FakeCell(token) for token in tokens]
        if not self.has_room(seq_id, len(new)):
            raise AssertionError(f"{len(new)} cells are needed in {self!r}")
        self._add_cells(seq_id, new)

    # ---- operations of the engine

    def remove(self, seq_id: int) -> None:
        self._cut_cells(seq_id, 0)

    def clear(self) -> None:
        for seq_id in self.memory:
            self.remove(seq_id)
        self.is_spoiled = False

    def copy(self, source: int, target: int, n_tokens: int) -> int:
        """Copy cells, see `SequenceOps.copy`. Raises `AssertionError` for cells that cannot be copied."""
        n_held = self.n_held(source)
        if self.n_held(target):
            raise AssertionError(f"sequence {target} is not empty")
        if n_tokens > n_held or (n_tokens < n_held and n_tokens and not self.can_cut):
            raise AssertionError(f"{n_tokens} of the {n_held} cells of sequence {source} cannot be shared")
        self.calls.append(("copy", source, target, n_tokens))
        if n_tokens < 1:
            return 0
        if self.kv_unified:
            self._add_cells(target, self._cells[source][:n_tokens])
        else:
            self.append(target, self.tokens(source)[:n_tokens])
        return n_tokens

    def cut(self, seq_id: int, n_tokens: int) -> int:
        """Cut the sequence, see `SequenceOps.cut`. A sequence that cannot be cut or has fewer cells is emptied."""
        n_held = self.n_held(seq_id)
        if n_tokens > n_held or (n_tokens < n_held and not self.can_cut):
            n_tokens = 0
        self._cut_cells(seq_id, n_tokens)
        return n_tokens

    def wait(self) -> None:
        """Do nothing: a batch is computed at once."""

    def save(self, seq_id: int, start: int, end: int, allocate: Allocate = no_buffer) -> SavedCells:
        """Return the positions and tokens of the cells, see `StateOps.save`."""
        n_held = self.n_held(seq_id)
        if not 0 <= start < end <= n_held:
            raise AssertionError(f"[{start}, {end}) is not in the {n_held} cells of sequence {seq_id}")
        if not self.can_save_parts and (start, end) != (0, n_held):
            raise AssertionError(f"[{start}, {end}) is not all of the {n_held} cells of sequence {seq_id}")
        if self._bad_saves:
            self._bad_saves -= 1
            raise EngineError("injected failure")
        self.calls.append(("save", seq_id, start, end))
        tokens = self.tokens(seq_id)[start:end]
        data = _HEADER.pack(_MAGIC, start, end) + struct.pack(f"<{len(tokens)}i", *tokens)
        if (ready := allocate(len(data))) is None:
            return data
        ready[:] = data
        return ready

    def load(self, seq_id: int, start: int, end: int, data: SavedCells, first: int) -> bool:
        """Append saved cells, see `StateOps.load`. Raises `AssertionError` for a wrong range."""
        if self.n_held(seq_id) != start or not 0 <= first <= start < end:
            raise AssertionError(
                f"[{start}, {end}) does not follow {self.n_held(seq_id)} cells, or begins before {first}"
            )
        if not self.can_save_parts and start:
            raise AssertionError(f"only a whole sequence can be loaded, not [{start}, {end})")
        self.calls.append(("load", seq_id, start, end))
        if self._bad_loads:
            self._bad_loads -= 1
            return False
        tokens = _parse(data, first)
        if tokens is None or not end <= first + len(tokens) or not self.has_room(seq_id, len(tokens)):
            return False
        if end < first + len(tokens) and not self.can_cut:
            raise AssertionError(f"only all of the {len(tokens)} tokens can be loaded, not {end}")
        self.append(seq_id, tokens[start - first : end - first])
        return True

    # ---- injected failures

    def fail_saves(self, n: int = 1) -> None:
        """Raise `EngineError` in the next `n` saves."""
        self._bad_saves += n

    def fail_loads(self, n: int = 1) -> None:
        """Return False from the next `n` loads."""
        self._bad_loads += n

    def _add_cells(self, seq_id: int, cells: list[FakeCell]) -> None:
        for cell in cells:
            self.used_cells += cell.n_holders == 0
            cell.n_holders += 1
        self._cells.setdefault(seq_id, []).extend(cells)

    def _cut_cells(self, seq_id: int, n_cells: int) -> None:
        self._check_id(seq_id)
        cells = self._cells.get(seq_id, [])
        for cell in cells[n_cells:]:
            cell.n_holders -= 1
            self.used_cells -= cell.n_holders == 0
        del cells[n_cells:]

    def _check_id(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.n_sequences:
            raise AssertionError(f"sequence {seq_id} is not usable in {self!r}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.memory)} sequences, {self.used_cells}/{self.n_ctx} cells>"


def _parse(data: SavedCells, first: int) -> tuple[int, ...] | None:
    if len(data) < _HEADER.size:
        return None
    magic, start, end = _HEADER.unpack_from(data)
    if magic != _MAGIC or start != first or len(data) != _HEADER.size + 4 * (end - start):
        return None
    return struct.unpack_from(f"<{end - start}i", data, _HEADER.size)
