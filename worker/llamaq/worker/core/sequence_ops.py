"""The operations on sequences that an engine offers."""

from __future__ import annotations

from typing import Protocol

from llamaq.worker.core.kv_data import Allocate, Data, nothing_ready


class SequenceOps(Protocol):
    """The engine's sequences, as far as they are moved about between ticks."""

    @property
    def can_cut(self) -> bool:
        """Whether a sequence can be copied in part and cut back; recurrent state cannot."""

    @property
    def in_blocks(self) -> bool:
        """Whether a sequence can be loaded in parts, after cells that it holds already."""

    def remove(self, seq_id: int) -> None:
        """Forget the sequence's cells; removing an empty one is allowed."""

    def copy(self, source: int, target: int, n_tokens: int) -> int:
        """Copy the first `n_tokens` cells into the empty sequence `target`; returns how many it truly holds then."""

    def cut(self, seq_id: int, n_tokens: int) -> int:
        """Keep the first `n_tokens` cells of a sequence; returns how many it truly holds then."""


class StateOps(Protocol):
    """What of the engine is needed here."""

    def save(self, seq_id: int, start: int, end: int, allocate: Allocate = nothing_ready) -> Data:
        """The cells [start, end) of a sequence; raises `EngineError`."""

    def load(self, seq_id: int, start: int, end: int, data: Data, first: int) -> bool:
        """Append [start, end) of `data`, which was saved from `first` on, to the `start` cells of a sequence."""


class SlotStateOps(SequenceOps, StateOps, Protocol):
    """What of the engine is needed here."""

    @property
    def cells_per_sequence(self) -> int:
        """The most cells that one sequence can have."""
