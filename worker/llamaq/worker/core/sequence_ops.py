"""The operations on sequences that an engine offers between ticks."""

from __future__ import annotations

from typing import Protocol

from llamaq.worker.core.cell_buffers import Allocate, Data, no_buffer


class SequenceOps(Protocol):
    """Copies, cuts and removes the KV cells of sequences."""

    @property
    def can_cut(self) -> bool:
        """Whether a sequence can be cut or copied at any token. A recurrent state cannot."""

    @property
    def can_save_parts(self) -> bool:
        """Whether saved cells can be loaded behind cells that the sequence already holds."""

    def remove(self, seq_id: int) -> None:
        """Remove all cells of the sequence, which may be empty."""

    def copy(self, source: int, target: int, n_tokens: int) -> int:
        """Copy the first `n_tokens` cells of `source` to the empty sequence `target`.

        Returns:
            The number of cells that `target` actually holds afterwards.
        """

    def cut(self, seq_id: int, n_tokens: int) -> int:
        """Remove the sequence's cells after the first `n_tokens`.

        Returns:
            The number of cells that the sequence actually holds afterwards.
        """


class StateOps(Protocol):
    """Saves the KV cells of sequences as bytes, and loads them again."""

    def save(self, seq_id: int, start: int, end: int, allocate: Allocate = no_buffer) -> Data:
        """Return the data of the sequence's cells [start, end).

        Raises:
            EngineError: The engine cannot read the cells.
        """

    def load(self, seq_id: int, start: int, end: int, data: Data, first: int) -> bool:
        """Append the cells [start, end) to a sequence that holds `start` cells.

        Args:
            seq_id: The sequence.
            start: The first cell to load.
            end: The end of the cells to load.
            data: The saved cells.
            first: The position of the first cell in `data`, at most `start`.

        Returns:
            False when the engine refuses the data.
        """


class SlotStateOps(SequenceOps, StateOps, Protocol):
    """Moves, saves and loads KV cells: both protocols above, and the size of a sequence."""

    @property
    def cells_per_sequence(self) -> int:
        """The largest number of cells of one sequence."""
