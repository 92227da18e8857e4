"""How many KV cells are in use when sequences share them, counted without looking at a single cell.

In one pool of cells a copied prefix costs nothing: its cells belong to both sequences, and are free when the last
owner has gone. Since sequences share beginnings and nothing else, a tree says it all:

    7   ████████████            12 cells
    └ 3 ████████░░░░░            8 of sequence 7, then 5 new ones
      └ 9 ██████░░                6 of sequence 3 (which are those of 7), then 2 new ones

Each sequence stands below one from whom it has its first `shared` cells; those behind are new, and every cell in use
is new in exactly one sequence. So 12 + 5 + 2 = 19 cells are in use here, where three sequences hold 33. When 7 goes,
3 inherits the 8 cells that it shares with it, and 4 become free.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Sequence:
    """Its first `shared` cells are the parent's, who holds at least so many; the others are new with it."""

    seq_id: int
    held: int = 0
    shared: int = 0
    parent: _Sequence | None = None
    """None exactly when `shared` is 0."""
    children: set[_Sequence] = field(default_factory=set)

    @property
    def claimed(self) -> int:
        """How many of its first cells another sequence holds too: by its parent, or by the child that has most."""
        return max([self.shared, *[child.shared for child in self.children]])

    def move(self, parent: _Sequence | None, shared: int) -> None:
        """Go below another parent; who shares no cell with it goes below nobody."""
        if self.parent is not None:
            self.parent.children.remove(self)
        self.parent, self.shared = (parent, shared) if shared else (None, 0)
        if self.parent is not None:
            self.parent.children.add(self)


class CellLedger:
    """Counts the cells of one pool of `n_cells`: those of each sequence, and those in use by all together.

    It is told what was done to KV memory: `grow`, `cut`, `share`, `drop`. A sequence without cells is unknown to it.
    Most calls cost one dictionary access; `cut`, `drop` and `owned` look at the sequences right below theirs as well,
    `shared` and `owned_together` at all.
    """

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self._sequences: dict[int, _Sequence] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Cells that at least one sequence holds."""
        return self._used

    @property
    def shared(self) -> int:
        """Cells that sharing saves: what all sequences hold, less what is used for it."""
        return sum(sequence.held for sequence in self._sequences.values()) - self._used

    def held(self, seq_id: int) -> int:
        """Cells of the sequence, 0 when it is empty."""
        sequence = self._sequences.get(seq_id)
        return sequence.held if sequence else 0

    def owned(self, seq_id: int) -> int:
        """Cells that nobody else holds: those that would be free if it were dropped now."""
        sequence = self._sequences.get(seq_id)
        return sequence.held - sequence.claimed if sequence else 0

    def owned_together(self, seq_ids: Collection[int]) -> int:
        """Cells that nobody else holds: those that would be free if all these were dropped now.

        At least the sum of `owned`: what they share among each other alone goes with the last of them.
        """
        reached: dict[_Sequence, int] = {}
        for seq_id, sequence in self._sequences.items():
            if seq_id not in seq_ids:
                _reach(sequence, reached)
        return self._used - sum(max(0, n - sequence.shared) for sequence, n in reached.items())

    def grow(self, seq_id: int, n_held: int) -> None:
        """The sequence, empty or not, holds `n_held` cells now; those that came are its own.

        `ValueError`, and nothing changes, when it holds more already or there are not so many cells.
        """
        sequence = self._sequences.get(seq_id)
        n_new = n_held - sequence.held if sequence else n_held
        if n_new < 0:
            raise ValueError(f"sequence {seq_id} holds {self.held(seq_id)} cells, it cannot grow to {n_held}")
        if self._used + n_new > self.n_cells:
            raise ValueError(f"sequence {seq_id} wants {n_new} cells, {self._used} of {self.n_cells} are used")
        if sequence:
            sequence.held = n_held
        elif n_held:
            self._sequences[seq_id] = _Sequence(seq_id, n_held)
        self._used += n_new

    def share(self, source: int, target: int, n: int) -> None:
        """The empty sequence `target` holds the first `n` cells of `source` too.

        `ValueError`, and nothing changes, when the target is not empty or the source holds fewer.
        """
        if target in self._sequences:
            raise ValueError(f"sequence {target} holds {self.held(target)} cells, only an empty one can share")
        if not 0 <= n <= self.held(source):
            raise ValueError(f"sequence {source} holds {self.held(source)} cells, {n} cannot be shared")
        if n:
            self._sequences[target] = copy = _Sequence(target, n)
            copy.move(self._sequences[source], n)

    def cut(self, seq_id: int, n_held: int) -> None:
        """The sequence keeps only its first `n_held` cells; `ValueError` when it does not hold so many."""
        if not 0 <= n_held <= self.held(seq_id):
            raise ValueError(f"sequence {seq_id} holds {self.held(seq_id)} cells, it cannot be cut to {n_held}")
        if n_held == self.held(seq_id):
            return
        sequence = self._sequences[seq_id]
        self._used -= sequence.held - max(n_held, sequence.claimed)
        _bequeath(sequence, n_held)
        sequence.held = n_held
        if n_held < sequence.shared:
            sequence.move(sequence.parent, n_held)
        if not n_held:
            del self._sequences[seq_id]

    def drop(self, seq_id: int) -> None:
        """The sequence is empty now; it may have been before."""
        self.cut(seq_id, 0)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the counts contradict each other."""
        for seq_id, sequence in self._sequences.items():
            self._check(seq_id, sequence)
        used = sum(sequence.held - sequence.shared for sequence in self._sequences.values())
        if used != self._used or not 0 <= used <= self.n_cells:
            raise AssertionError(f"{used} cells are used, {self._used} were counted, there are {self.n_cells}")

    def _check(self, seq_id: int, sequence: _Sequence) -> None:
        parent, shared, held = sequence.parent, sequence.shared, sequence.held
        if sequence.seq_id != seq_id or not held or not 0 <= shared <= held or (parent is None) != (shared == 0):
            raise AssertionError(f"sequence {seq_id} shares {shared} of {held} cells with {parent}")
        for child in sequence.children:
            if child.parent is not sequence or child.shared > held or not self._knows(child):
                raise AssertionError(f"sequence {child.seq_id} does not share {child.shared} cells with {seq_id}")
        above, child = {sequence}, sequence
        while parent is not None:
            if parent in above or child not in parent.children or not self._knows(parent):
                raise AssertionError(f"sequence {seq_id} is not below {parent.seq_id}")
            above.add(parent)
            child, parent = parent, parent.parent

    def _knows(self, sequence: _Sequence) -> bool:
        return self._sequences.get(sequence.seq_id) is sequence

    def __repr__(self) -> str:
        n = len(self._sequences)
        return f"<CellLedger {self._used}/{self.n_cells} cells used, {self.shared} shared, {n} sequences>"


def _reach(sequence: _Sequence, reached: dict[_Sequence, int]) -> None:
    """Note, for it and those above it, that their cells up to some are held by `sequence`."""
    n, at = sequence.held, sequence
    while reached.get(at, 0) < n:
        reached[at] = n
        if at.parent is None:
            return
        n, at = min(n, at.shared), at.parent


def _bequeath(sequence: _Sequence, n_kept: int) -> None:
    """Give the cells behind the first `n_kept` to those who share them.

    Of a sequence s with `shared` cells, a child c is affected when c.shared > n_kept:

    - c.shared <= s.shared: what c has are cells of the grandparent, below whom it goes.
    - otherwise the child that shares most is the heir. It has, of those who stay, max(n_kept, s.shared) cells: of s
      itself or, where that keeps fewer, of the grandparent. Cells behind are new with the heir from now on.
    - the others share at most as much, so they find all that they had in the heir.
    """
    stays, n_stay = (sequence, n_kept) if n_kept >= sequence.shared else (sequence.parent, sequence.shared)
    affected = [child for child in sequence.children if child.shared > n_kept]
    orphans = [child for child in affected if child.shared > n_stay]
    heir = max(orphans, key=lambda child: child.shared, default=None)
    for child in affected:
        if child is heir:
            child.move(stays, n_stay)
        elif child.shared > n_stay:
            child.move(heir, child.shared)
        else:
            child.move(stays, child.shared)
