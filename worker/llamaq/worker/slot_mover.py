"""What moves the states of slots."""

from __future__ import annotations

from typing import Protocol

from llamaq.worker.block_tiers import StateMover
from llamaq.worker.memory import Sequences


class Mover(Sequences, StateMover, Protocol):
    """What of the engine is needed here."""

    @property
    def cells_per_sequence(self) -> int:
        """The most cells that one sequence can have."""
