"""Counts the candidates that llama.cpp has masked, where this chain of samplers has dropped them."""

from __future__ import annotations

from collections.abc import Sequence

from llamaq.worker.generation.sampling.candidates import Apply, Candidates


class MaskedCount:
    """The number of candidates that llama.cpp still has here, with the probability 0, and that this chain has dropped.

    In llama.cpp, top-n-sigma only masks candidates. The samplers after it drop them, unless fewer candidates are left
    than they keep. The dynamic temperature and `infill` depend on the number of all candidates, with the masked ones.
    """

    def __init__(self) -> None:
        self.n = 0

    def begun_by(self, first: Apply) -> Apply:
        """Return a step that begins the count of a draw."""

        def apply(candidates: Candidates, history: Sequence[int], position: int) -> Candidates:
            self.n = 0
            return first(candidates, history, position)

        return apply

    def raised_by(self, top_n_sigma: Apply) -> Apply:
        """Return a step that adds the candidates that it drops."""

        def apply(candidates: Candidates, history: Sequence[int], position: int) -> Candidates:
            kept = top_n_sigma(candidates, history, position)
            self.n += len(candidates) - len(kept)
            return kept

        return apply

    def lowered_by(self, step: Apply, n_least: int) -> Apply:
        """Return a step that subtracts what it drops in llama.cpp, where it keeps at least `n_least` candidates."""

        def apply(candidates: Candidates, history: Sequence[int], position: int) -> Candidates:
            kept = step(candidates, history, position)
            self.n = min(self.n, max(0, n_least - len(kept)))
            return kept

        return apply


NONE_MASKED = MaskedCount()
"""The count of a chain in which nothing is counted: it stays 0."""
