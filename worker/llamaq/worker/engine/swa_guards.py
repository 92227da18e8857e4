"""Guard sequences keep the cells of sliding-window layers that have left the window.

llama.cpp reuses a cell of such a layer for new tokens when one sequence alone holds the cell and the cell's token has
left the window of that sequence. This also happens with `swa_full`. The sequence itself no longer needs the cell.
However, a prompt that begins with the same tokens needs it, and a save of the sequence needs it too. A cell that two
sequences hold is never reused. Therefore each sequence has a guard sequence, which holds the same cells and computes
nothing.
"""

from __future__ import annotations

from llamaq.worker.engine.llama_bindings import Context

STEPS_PER_WINDOW = 2
"""A sequence's new cells are shared with its guard each time they fill half a window. Each batch is computed in
one step, so they have not left the window before."""


class SwaGuards:
    """The guard sequences of one context.

    Args:
        context: The context.
        n_swa: Number of tokens in the window.
        offset: The guard of sequence `s` is sequence `s + offset`.
    """

    def __init__(self, context: Context, n_swa: int, offset: int) -> None:
        self._context = context
        self._offset = offset
        self._step = max(1, n_swa // STEPS_PER_WINDOW)
        self._n_guarded: dict[int, int] = {}
        """Number of tokens of each sequence that its guard also holds."""

    def extend(self, seq_id: int, n_tokens: int) -> None:
        """Share the new cells of a sequence that now holds `n_tokens`, if they fill half a window."""
        n_guarded = self._n_guarded.get(seq_id, 0)
        if n_tokens - n_guarded >= self._step:
            self._context.share(seq_id, seq_id + self._offset, n_guarded, n_tokens)
            self._n_guarded[seq_id] = n_tokens

    def cut(self, seq_id: int, n_tokens: int) -> None:
        """Release the cells of a sequence after the first `n_tokens`. Called before the sequence itself is cut."""
        if n_tokens < self._n_guarded.get(seq_id, 0):
            self._context.remove(seq_id + self._offset, n_tokens)
            self._n_guarded[seq_id] = n_tokens

    def clear(self) -> None:
        """Record that the cells of all sequences and of their guards were removed."""
        self._n_guarded.clear()

    def __repr__(self) -> str:
        return f"<SwaGuards {sum(n > 0 for n in self._n_guarded.values())} sequences>"
