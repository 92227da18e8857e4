"""DRY (do not repeat yourself): lowers the logits of tokens that would extend a repetition."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
import numpy.typing as npt

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.sampling.candidates import Candidates, TokenIds
from llamaq.worker.generation.sampling.sequence_breakers import SequenceBreakers

FLOAT_MAX_LOG = 88.7228391
"""Natural logarithm of the largest float32: larger exponents of the base are not used."""
SMALLEST_BASE = 1.000001
"""Exponents of the base are bounded only if the base is larger than this, as in llama.cpp."""
MAX_PENALTY = 1e30

Lengths = npt.NDArray[np.int32]


class Dry:
    """DRY for one growing history. Source: llama_sampler_dry_apply.

    A repetition at a position of the history is a sequence of tokens before this position that equals the last tokens
    of the history. A new token extends a repetition if it equals the token at the position of the repetition. It ends
    all other repetitions. Therefore no step searches the history.

    Args:
        params: The sampling parameters.
        breakers: The sequences at which repetitions end.
    """

    def __init__(self, params: SamplingDefaults, breakers: SequenceBreakers) -> None:
        self._multiplier, self._base = params.dry_multiplier, params.dry_base
        self._allowed, self._n_last = params.dry_allowed_length, params.dry_penalty_last_n
        self._max_exponent = int(FLOAT_MAX_LOG / log(self._base)) if self._base > SMALLEST_BASE else np.inf
        self._breakers = breakers
        self._tokens = np.zeros(0, np.intp)
        """The history. The array may be longer."""
        self._lengths = np.zeros(0, np.int32)
        """For each position, the length of the repetition at it, in tokens."""
        self._n_seen = 0
        """Number of tokens of the history that these arrays cover."""
        self._break_at, self._break_tail = -1, 0
        """Position of the last breaker in the history, and the number of its tokens after the first."""

    def penalize(self, candidates: Candidates, history: Sequence[int]) -> Candidates:
        """Lower the logits in place. `history` begins with the history of the last call."""
        if not self._n_seen:
            self._start(history)
        for position in range(self._n_seen, len(history)):
            self._append(history, position)
        tokens, lengths = self._repetitions()
        if tokens.size:
            given, own = candidates.find(tokens)
            exponents = np.minimum(lengths[given] - self._allowed, self._max_exponent)
            penalties = np.minimum(self._multiplier * self._base**exponents, MAX_PENALTY)
            candidates.logits[own] -= penalties.astype(np.float32)
        return candidates.with_logits(candidates.logits)

    def _start(self, history: Sequence[int]) -> None:
        """Compute the state for a whole history."""
        n, first = len(history), self._window_start(len(history))
        self._tokens = np.array(history, np.intp)
        self._lengths = np.zeros(n, np.int32)
        # The tokens before a position are, in the reversed history, those from its mirror image on.
        mirrored = common_prefixes(history[first:][::-1])
        self._lengths[first + 1 :] = mirrored[:0:-1]
        for end in range(first + 1, n + 1):
            self._find_breaker(history, end)
        self._n_seen = n

    def _append(self, history: Sequence[int], position: int) -> None:
        """Advance the state by the token at a position."""
        if position == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * position + 64)
            self._lengths = np.resize(self._lengths, 2 * position + 64)
        token, first = history[position], self._window_start(position)
        is_extended = self._tokens[first:position] == token
        self._lengths[first + 1 : position + 1] = np.where(is_extended, self._lengths[first:position] + 1, 0)
        self._lengths[first] = 0
        self._tokens[position] = token
        self._n_seen = position + 1
        self._find_breaker(history, position + 1)

    def _find_breaker(self, history: Sequence[int], end: int) -> None:
        tail = self._breakers.tail_before(history, end)
        if tail is not None and (end - 1 - tail, tail) > (self._break_at, self._break_tail):
            self._break_at, self._break_tail = end - 1 - tail, tail

    def _window_start(self, end: int) -> int:
        return max(0, end - self._n_last) if self._n_last >= 0 else 0

    def _repetitions(self) -> tuple[TokenIds, Lengths]:
        """Return the tokens that would extend a repetition, and the length of the longest one for each."""
        end, first = self._n_seen, self._window_start(self._n_seen)
        longest = end - first
        if longest <= self._allowed:
            return self._tokens[:0], self._lengths[:0]
        if self._break_at >= first:
            longest = end - 1 - self._break_at - self._break_tail
        lengths = np.minimum(self._lengths[first + 1 : end], np.arange(1, end - first))
        places = np.flatnonzero(lengths >= self._allowed)
        if longest < self._allowed or not places.size:
            return self._tokens[:0], self._lengths[:0]
        longest_first = places[np.argsort(-lengths[places], kind="stable")]
        tokens, chosen = np.unique(self._tokens[first + 1 : end][longest_first], return_index=True)
        kept = [index for index, token in enumerate(tokens.tolist()) if not self._breakers.is_single(token)]
        return tokens[kept], np.minimum(lengths[longest_first[chosen]], longest)[kept].astype(np.int32)

    def __repr__(self) -> str:
        return f"<Dry after {self._n_seen} tokens>"


def common_prefixes(values: Sequence[int]) -> Lengths:
    """Return for each position how many values from this position on equal the first values.

    This is the Z function, computed in linear time.
    """
    n = len(values)
    lengths = [n] + [0] * (n - 1) if n else []
    left = right = 0  # the values from `left` to `right` equal the first values
    for position in range(1, n):
        length = min(right - position, lengths[position - left]) if position < right else 0
        while position + length < n and values[length] == values[position + length]:
            length += 1
        lengths[position] = length
        if position + length > right:
            left, right = position, position + length
    return np.array(lengths, np.int32)
