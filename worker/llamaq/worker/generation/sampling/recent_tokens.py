"""The tokens that the penalties count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamaq.worker.generation.sampling.candidates import TokenIds

FIRST_CAPACITY = 64


class RecentTokens:
    """Counts the occurrences of the last tokens of a growing history.

    Args:
        n_last: Number of tokens that are counted. -1 counts all.
    """

    def __init__(self, n_last: int) -> None:
        self._n_last = n_last
        self._n_seen = 0
        """Number of tokens of the history that the counts include."""
        self._places: dict[int, int] = {}
        """For each token that occurs: its index in the arrays."""
        self._tokens = np.zeros(FIRST_CAPACITY, np.intp)
        self._counts = np.zeros(FIRST_CAPACITY, np.float32)

    def counts(self, history: Sequence[int]) -> tuple[TokenIds, npt.NDArray[np.float32]]:
        """Return the tokens that occur in the last tokens of `history`, and the number of their occurrences.

        The arrays are valid until the next call. `history` begins with the history of the last call.
        """
        if not self._n_seen:
            self._start(history)
        for position in range(self._n_seen, len(history)):
            self._add(history[position])
            if 0 <= self._n_last <= position:
                self._remove(history[position - self._n_last])
        self._n_seen = len(history)
        n = len(self._places)
        return self._tokens[:n], self._counts[:n]

    def _start(self, history: Sequence[int]) -> None:
        """Count a whole history, from the beginning."""
        counted = history[-self._n_last :] if self._n_last > 0 else history
        tokens, counts = np.unique(np.array(counted, np.intp), return_counts=True)
        self._tokens, self._counts = tokens, counts.astype(np.float32)
        self._places = {token: place for place, token in enumerate(tokens.tolist())}
        self._n_seen = len(history)

    def _add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._tokens):
                self._tokens = np.resize(self._tokens, 2 * place + FIRST_CAPACITY)
                self._counts = np.resize(self._counts, 2 * place + FIRST_CAPACITY)
            self._tokens[place], self._counts[place] = token, 0
        self._counts[place] += 1

    def _remove(self, token: int) -> None:
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place]:
            return
        del self._places[token]
        last = len(self._places)
        if place != last:  # the last token takes the free place, so that the arrays have no gap
            moved = int(self._tokens[last])
            self._tokens[place], self._counts[place] = moved, self._counts[last]
            self._places[moved] = place
