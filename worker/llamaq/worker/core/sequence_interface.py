"""The operations on sequences that an engine offers between ticks."""

from __future__ import annotations

from typing import Protocol

from llamaq.worker.core.saved_cells import Allocate, SavedCells, no_buffer


class SequenceOps(Protocol):
    """Copies, cuts and removes the KV cells of sequences."""

    @property
    def can_cut(self) -> bool:
        """Whether a sequence can be cut at any token, and any prefix of it copied. False for a recurrent state."""

    @property
    def can_remove_draft(self) -> bool:
        """Whether the last tokens of a sequence can be removed after they were decoded."""

    @property
    def can_save_parts(self) -> bool:
        """Whether saved cells can be appended to a sequence that already holds cells."""

    def remove(self, seq_id: int) -> None:
        """Remove all cells of the sequence. The sequence may already be empty."""

    def clear(self) -> None:
        """Remove all cells of all sequences, and overwrite the data of the cells."""

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

    def wait(self) -> None:
        """Wait until the device has computed all batches."""

    def save(self, seq_id: int, start: int, end: int, allocate: Allocate = no_buffer) -> SavedCells:
        """Return the sequence's cells from `start` up to but not including `end`, as bytes.

        Raises:
            EngineError: The engine cannot read the cells.
        """

    def load(self, seq_id: int, start: int, end: int, data: SavedCells, first: int) -> bool:
        """Append the cells from `start` up to but not including `end` to a sequence that holds `start` cells.

        Args:
            seq_id: The sequence.
            start: Position of the first cell to load.
            end: Position after the last cell to load.
            data: The saved cells.
            first: Position in the sequence of the first cell that `data` contains, at most `start`.

        Returns:
            False when the engine refuses the data.
        """


class SlotStateOps(SequenceOps, StateOps, Protocol):
    """Combines `SequenceOps` and `StateOps`, and adds what saved slots need."""

    @property
    def can_cut_saved(self) -> bool:
        """Whether saved cells can also be loaded up to an earlier token."""

    @property
    def cells_per_sequence(self) -> int:
        """The largest number of cells of one sequence."""
