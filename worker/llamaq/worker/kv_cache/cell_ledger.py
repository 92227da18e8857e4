"""Counts the KV cells in use when sequences share cells, without a record of each cell.

If all sequences use one pool of cells, a copied prefix needs no new cells: its cells belong to both sequences. A cell
becomes free when the last sequence that holds it is removed. Sequences share only prefixes, so a tree describes which
cells are shared. In this example the sequences have the ids 7, 3 and 9:

    7   ████████████            12 cells
    └ 3 ████████░░░░░            8 cells of sequence 7, then 5 new cells
      └ 9 ██████░░                6 cells of sequence 3 (also cells of sequence 7), then 2 new cells

The first `shared` cells of a sequence are also cells of its parent. The other cells of the sequence are called new.
Every cell in use is a new cell of exactly one sequence. Therefore 12 + 5 + 2 = 19 cells are in use in the example,
although the sequences hold 12 + 13 + 8 = 33 cells. When sequence 7 is removed, the 8 cells that it shares with sequence
3 become new cells of sequence 3. The other 4 cells become free.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Sequence:
    """A node of the tree. Its first `shared` cells are also cells of the parent. The other cells are new cells."""

    seq_id: int
    held: int = 0
    shared: int = 0
    parent: _Sequence | None = None
    """None exactly when `shared` is 0."""
    children: set[_Sequence] = field(default_factory=set)

    @property
    def claimed(self) -> int:
        """Number of this sequence's cells that its parent or a child also holds."""
        return max([self.shared, *[child.shared for child in self.children]])

    def move(self, parent: _Sequence | None, shared: int) -> None:
        """Change the parent. A sequence with 0 shared cells has no parent."""
        if self.parent is not None:
            self.parent.children.remove(self)
        self.parent, self.shared = (parent, shared) if shared else (None, 0)
        if self.parent is not None:
            self.parent.children.add(self)


class CellLedger:
    """Counts the cells of each sequence, and the cells in use, in one pool of `n_cells`.

    The caller records each change of KV memory with `grow`, `cut`, `share` or `drop`. An empty sequence has no record.
    Most calls cost one dictionary access. `cut`, `drop` and `owned` also visit the children of the sequence, and
    `shared` and `owned_together` visit all sequences.
    """

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self._sequences: dict[int, _Sequence] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Number of cells that at least one sequence holds."""
        return self._used

    @property
    def shared(self) -> int:
        """Number of cells that sharing saves: the sum of the cells of all sequences, minus the cells in use."""
        return sum(sequence.held for sequence in self._sequences.values()) - self._used

    def held(self, seq_id: int) -> int:
        """Return the number of cells of the sequence, 0 when it is empty."""
        sequence = self._sequences.get(seq_id)
        return sequence.held if sequence else 0

    def owned(self, seq_id: int) -> int:
        """Return the number of cells that only this sequence holds. They become free when the sequence is dropped."""
        sequence = self._sequences.get(seq_id)
        return sequence.held - sequence.claimed if sequence else 0

    def owned_together(self, seq_ids: Collection[int]) -> int:
        """Return the number of cells that become free when all these sequences are dropped.

        The result is at least the sum of `owned` over the sequences. It is larger when several of these sequences share
        cells that no other sequence holds.
        """
        reached: dict[_Sequence, int] = {}
        for seq_id, sequence in self._sequences.items():
            if seq_id not in seq_ids:
                _mark_reached(sequence, reached)
        return self._used - sum(max(0, n - sequence.shared) for sequence, n in reached.items())

    def resize(self, seq_id: int, n_held: int) -> None:
        """Record that the sequence now holds `n_held` cells, more or fewer than before. See `grow` and `cut`."""
        if n_held < self.held(seq_id):
            self.cut(seq_id, n_held)
        else:
            self.grow(seq_id, n_held)

    def grow(self, seq_id: int, n_held: int) -> None:
        """Record that the sequence, which may have been empty, now holds `n_held` cells. Added cells are not shared.

        Raises:
            ValueError: The sequence already holds more cells, or too few cells are free. Nothing changes.
        """
        sequence = self._sequences.get(seq_id)
        n_new = n_held - sequence.held if sequence else n_held
        if n_new < 0:
            raise ValueError(f"sequence {seq_id} holds {self.held(seq_id)} cells, it cannot grow to {n_held}")
        if self._used + n_new > self.n_cells:
            raise ValueError(f"sequence {seq_id} needs {n_new} cells, {self._used} of {self.n_cells} are used")
        if sequence:
            sequence.held = n_held
        elif n_held:
            self._sequences[seq_id] = _Sequence(seq_id, n_held)
        self._used += n_new

    def share(self, source: int, target: int, n: int) -> None:
        """Record that the empty sequence `target` now also holds the first `n` cells of `source`.

        Raises:
            ValueError: The target is not empty, or the source holds fewer cells. Nothing changes.
        """
        if target in self._sequences:
            raise ValueError(f"sequence {target} holds {self.held(target)} cells, only an empty one can share")
        if not 0 <= n <= self.held(source):
            raise ValueError(f"sequence {source} holds {self.held(source)} cells, {n} cannot be shared")
        if n:
            self._sequences[target] = copy = _Sequence(target, n)
            copy.move(self._sequences[source], n)

    def cut(self, seq_id: int, n_held: int) -> None:
        """Record that the sequence now holds only its first `n_held` cells.

        Raises:
            ValueError: The sequence holds fewer cells. Nothing changes.
        """
        if not 0 <= n_held <= self.held(seq_id):
            raise ValueError(f"sequence {seq_id} holds {self.held(seq_id)} cells, it cannot be cut to {n_held}")
        if n_held == self.held(seq_id):
            return
        sequence = self._sequences[seq_id]
        self._used -= sequence.held - max(n_held, sequence.claimed)
        _move_children(sequence, n_held)
        sequence.held = n_held
        if n_held < sequence.shared:
            sequence.move(sequence.parent, n_held)
        if not n_held:
            del self._sequences[seq_id]

    def drop(self, seq_id: int) -> None:
        """Record that the sequence is now empty. Does nothing if the sequence is already empty."""
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
            if child.parent is not sequence or child.shared > held or not self._has_record(child):
                raise AssertionError(f"sequence {child.seq_id} does not share {child.shared} cells with {seq_id}")
        ancestors, child = {sequence}, sequence
        while parent is not None:
            if parent in ancestors or child not in parent.children or not self._has_record(parent):
                raise AssertionError(f"sequence {seq_id} is not below {parent.seq_id}")
            ancestors.add(parent)
            child, parent = parent, parent.parent

    def _has_record(self, sequence: _Sequence) -> bool:
        return self._sequences.get(sequence.seq_id) is sequence

    def __repr__(self) -> str:
        n = len(self._sequences)
        return f"<CellLedger {self._used}/{self.n_cells} cells used, {self.shared} shared, {n} sequences>"


def _mark_reached(sequence: _Sequence, reached: dict[_Sequence, int]) -> None:
    """Record in `reached` which cells of its ancestors `sequence` holds.

    `reached` maps a node to a number n: one of the sequences marked so far holds the first n cells of this node. This
    function increases the numbers of `sequence` and of its ancestors, if `sequence` holds more of their cells.
    """
    n, node = sequence.held, sequence
    while reached.get(node, 0) < n:
        reached[node] = n
        if node.parent is None:
            return
        n, node = min(n, node.shared), node.parent


def _move_children(sequence: _Sequence, n_kept: int) -> None:
    """Give a new parent to each child that shares cells after the first `n_kept` cells of the sequence.

    The sequence is about to lose these cells, so the new parent must be another sequence that holds them. Three cases
    exist for a child with `child.shared > n_kept`:

    - `child.shared <= sequence.shared`: the parent of the sequence also holds all shared cells. It becomes the parent
      of the child.
    - Among the other children, the one that shares the most cells becomes the heir. If `n_kept >= sequence.shared`, the
      heir stays a child of the sequence and shares `n_kept` cells with it. Otherwise it becomes a child of the
      sequence's parent and shares `sequence.shared` cells with that parent. All its other cells become its new cells.
    - Every remaining child shares no more cells than the heir, so it becomes a child of the heir.
    """
    base, n_base = (sequence, n_kept) if n_kept >= sequence.shared else (sequence.parent, sequence.shared)
    moving = [child for child in sequence.children if child.shared > n_kept]
    orphans = [child for child in moving if child.shared > n_base]
    heir = max(orphans, key=lambda child: child.shared, default=None)
    for child in moving:
        if child is heir:
            child.move(base, n_base)
        elif child.shared > n_base:
            child.move(heir, child.shared)
        else:
            child.move(base, child.shared)
