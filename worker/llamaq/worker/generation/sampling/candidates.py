"""The candidates for the next token.

Arrays have one dimension: (n_vocab,) for logits of the whole vocabulary, (n_candidates,) for logits of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

Logits: TypeAlias = npt.NDArray[np.float32]
TokenIds: TypeAlias = npt.NDArray[np.intp]
Indices: TypeAlias = npt.NDArray[np.intp]


class Candidates:
    """The tokens that may be drawn. Corresponds to llama_token_data_array of llama.cpp.

    Args:
        logits: Logits of the tokens, shape (n_candidates,).
        tokens: Their ids, shape (n_candidates,). None: the candidates are the whole vocabulary, in ascending order of
            ids, so that indices and ids are the same.
        is_sorted: Whether the logits are in descending order.
    """

    __slots__ = ("is_sorted", "logits", "tokens")

    def __init__(self, logits: Logits, tokens: TokenIds | None = None, *, is_sorted: bool = False) -> None:
        self.logits = logits
        self.tokens = tokens
        self.is_sorted = is_sorted

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def max_logit(self) -> np.float32:
        """The largest logit. There must be a candidate."""
        largest: np.float32 = self.logits[0] if self.is_sorted else self.logits.max()
        return largest

    def token_at(self, index: int) -> int:
        """Return the id of the candidate at an index."""
        return index if self.tokens is None else int(self.tokens[index])

    def take(self, indices: Indices) -> Candidates:
        """Return the candidates at these indices, which are in ascending order."""
        tokens = indices if self.tokens is None else self.tokens.take(indices)
        return Candidates(self.logits.take(indices), tokens, is_sorted=self.is_sorted)

    def head(self, n: int) -> Candidates:
        """Return the first `n` of sorted candidates: those with the largest logits."""
        if n >= len(self.logits):
            return self
        tokens = np.arange(n) if self.tokens is None else self.tokens[:n]
        return Candidates(self.logits[:n], tokens, is_sorted=True)

    def sorted(self) -> Candidates:
        """Return the candidates in descending order of logits. Among equal logits, the order stays the same."""
        if self.is_sorted:
            return self
        order = (-self.logits).argsort(kind="stable")
        tokens = order if self.tokens is None else self.tokens[order]
        return Candidates(self.logits[order], tokens, is_sorted=True)

    @classmethod
    def only(cls, token: int) -> Self:
        """Return a token alone, with the logit 0, so that it is drawn even if it is masked."""
        return cls(np.zeros(1, np.float32), np.array([token]), is_sorted=True)

    def by_token(self) -> Candidates:
        """Return the candidates in ascending order of ids."""
        # A check takes much less time than sorting: without top-k, the candidates can be nearly the whole vocabulary.
        if self.tokens is None or bool((self.tokens[1:] > self.tokens[:-1]).all()):
            return self
        order = self.tokens.argsort()
        return Candidates(self.logits[order], self.tokens[order])

    def with_logits(self, logits: Logits, *, is_sorted: bool = False) -> Candidates:
        """Return the same tokens with other logits."""
        return Candidates(logits, self.tokens, is_sorted=is_sorted)

    def without_masked(self) -> Candidates:
        """Return the candidates whose logit is not minus infinity."""
        unmasked = self.logits != -np.inf
        return self if unmasked.all() else self.take(np.flatnonzero(unmasked))

    def find(self, tokens: TokenIds) -> tuple[Indices | slice, Indices]:
        """Return which of these tokens are candidates, as indices of `tokens`, and their indices among the candidates.

        Each token occurs at most once in `tokens`.
        """
        if self.tokens is None:
            return slice(None), tokens
        _, own, given = np.intersect1d(self.tokens, tokens, assume_unique=True, return_indices=True)
        return given, own

    def add(self, tokens: TokenIds, values: Logits | float) -> None:
        """Add values to the logits of those of these tokens that are candidates. The ids must be in ascending order."""
        if self.tokens is None:
            raise ValueError("the candidates are the whole vocabulary: use their logits")
        places = self.tokens.searchsorted(tokens)
        places[places == len(self.tokens)] = 0
        found = self.tokens[places] == tokens
        self.logits[places[found]] += values[found] if isinstance(values, np.ndarray) else values

    def weights(self) -> Logits:
        """Return exp(logit_i - max_logit): the softmax of the logits without its normalization."""
        weights: Logits = np.exp(self.logits - self.max_logit)
        return weights

    def probabilities(self) -> npt.NDArray[np.float64]:
        """Return the softmax of the logits."""
        weights = self.weights().astype(np.float64)
        probabilities: npt.NDArray[np.float64] = weights / weights.sum()
        return probabilities

    def __repr__(self) -> str:
        return f"<Candidates {len(self)}{' sorted' if self.is_sorted else ''}>"


Apply: TypeAlias = Callable[[Candidates, Sequence[int], int], Candidates]
"""A sampler: a function of the candidates, the history and the position of the draw in the output."""
