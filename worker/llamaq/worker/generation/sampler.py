"""From logits to a token: llama.cpp's sampler chain in numpy, with a draw that can be repeated.

The order is llama.cpp's: logit bias, penalties, grammar, top-k, typical-p, top-p, min-p, temperature. The final draw is
ours: its uniform number is a hash of (seed, position), so that an attempt which goes on at some token draws as the
attempt before it would have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import inf, isnan

import numpy as np

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.worker.generation.grammar.compiled_grammar import Grammar
from llamaq.worker.generation.token_filters import (
    Candidates,
    Logits,
    Places,
    all_candidates,
    top_k,
    top_p_min_p,
    typical_p,
)

TRIED_FIRST = 256
"""So many of the best tokens are shown to a grammar before others."""
GREEDY_BELOW = 1e-6
"""Colder, and logits divided by the temperature are no float32 any more."""
NOTHING_LEFT = "no token of the vocabulary may follow here"


class LogitSampler:
    """One job's sampler; implements `jobs.Sampler`."""

    def __init__(
        self,
        params: SamplingDefaults,
        *,
        seed: int,
        logit_bias: Mapping[int, float] | None = None,
        masked_tokens: Iterable[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """`masked_tokens` are never drawn (the end tokens, for `ignore_eos`). `close` closes the grammar too."""
        self._params = params
        self._seed = seed.to_bytes(8, "little")
        self._bias_tokens = np.fromiter(logit_bias or (), np.int64)
        self._bias = np.fromiter((logit_bias or {}).values(), np.float32)
        self._masked = np.fromiter(masked_tokens, np.int64)
        self._grammar = grammar
        self._penalizes = params.penalty_last_n != 0 and (
            params.repeat_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )

    def sample(self, logits: Logits, history: Sequence[int], n_prompt: int) -> int:
        """Draw the token that follows `history`; see `jobs.Sampler`."""
        self._adjust(logits, history)
        if self._grammar is not None:
            return self._sample_by(self._grammar, logits, history[n_prompt:])
        if self._is_greedy:
            return _best_token(logits)
        return self._draw(self._candidates(logits), len(history) - n_prompt)

    def distribution(self, logits: Logits, history: Sequence[int]) -> tuple[Places, Logits]:
        """The tokens that may be drawn and their probabilities, as they are without a grammar; changes `logits`."""
        self._adjust(logits, history)
        kept = self._filter(self._candidates(logits))
        weights = self._weights(kept)
        return kept.tokens, weights / weights.sum()

    def close(self) -> None:
        """Free the grammar; may be called twice."""
        if self._grammar is not None:
            self._grammar.close()

    @property
    def _is_greedy(self) -> bool:
        return self._params.temperature < GREEDY_BELOW

    def _sample_by(self, grammar: Grammar, logits: Logits, generated: Sequence[int]) -> int:
        """Draw freely, and where the grammar refuses that token, again from those that it allows."""
        grammar.follow(generated)
        token = self._draw(self._candidates(logits), len(generated))
        if grammar.allows(token):
            return token
        return self._draw(self._allowed(grammar, logits), len(generated))

    def _candidates(self, logits: Logits) -> Candidates:
        k = 1 if self._is_greedy else self._params.top_k
        return top_k(logits, k) if k else all_candidates(logits)

    def _allowed(self, grammar: Grammar, logits: Logits) -> Candidates:
        """The tokens that the grammar allows, the best `top_k` of them."""
        n_wanted = 1 if self._is_greedy else self._params.top_k
        n_tried = max(TRIED_FIRST, 4 * n_wanted) if n_wanted else logits.size
        while n_tried < logits.size:
            tried = top_k(logits, n_tried)
            allowed = tried[grammar.allowed(tried.tokens)]
            if len(allowed) >= n_wanted:
                return allowed.best_of(n_wanted)
            n_tried *= 16
        tried = all_candidates(logits)
        allowed = tried[grammar.allowed(tried.tokens)]
        return allowed.best_of(n_wanted) if n_wanted else allowed

    def _filter(self, candidates: Candidates) -> Candidates:
        params = self._params
        if params.typical_p < 1:
            candidates = typical_p(candidates, params.typical_p)
        return top_p_min_p(candidates, params.top_p, params.min_p)

    def _weights(self, candidates: Candidates) -> Logits:
        weights: Logits = np.exp(
            (candidates.logits - np.float32(candidates.best)) / np.float32(max(self._params.temperature, GREEDY_BELOW))
        )
        return weights

    def _draw(self, candidates: Candidates, position: int) -> int:
        """Filter, then take the candidate at which the cumulated probability exceeds the uniform number."""
        if not len(candidates):
            raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, NOTHING_LEFT)
        _check_numbers(candidates.best)
        if self._is_greedy:
            return int(candidates.tokens[0])
        kept = self._filter(candidates)
        cumulated = np.cumsum(self._weights(kept), dtype=np.float64)
        place = int(cumulated.searchsorted(self._uniform(position) * cumulated[-1], side="right"))
        return int(kept.tokens[min(place, len(kept) - 1)])  # rounding can carry the target to the very end

    def _uniform(self, position: int) -> float:
        """A number from 0 to below 1 that depends on seed and position alone."""
        digest = blake2b(position.to_bytes(8, "little"), digest_size=8, key=self._seed).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def _adjust(self, logits: Logits, history: Sequence[int]) -> None:
        """Put bias, penalties and mask on the logits, in place: to copy a large row costs more than all the rest."""
        if self._bias_tokens.size:
            if self._bias_tokens.max() >= logits.size:
                message = f"logit_bias names token {self._bias_tokens.max()}, the vocabulary has {logits.size}"
                raise JobRejected(ErrorCode.INVALID_TOKEN, message)
            logits[self._bias_tokens] += self._bias
        if self._penalizes:
            self._penalize(logits, history)
        if self._masked.size:
            logits[self._masked] = -np.inf

    def _penalize(self, logits: Logits, history: Sequence[int]) -> None:
        params = self._params
        n_last = len(history) if params.penalty_last_n < 0 else params.penalty_last_n
        counts = Counter(history[-n_last:])
        tokens = np.fromiter(counts.keys(), np.int64)
        occurrences = np.fromiter(counts.values(), np.float32)
        penalized = logits[tokens]
        repeat = np.float32(params.repeat_penalty)
        penalized = np.where(penalized <= 0, penalized * repeat, penalized / repeat)
        penalty = occurrences * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
        logits[tokens] = penalized - penalty


def _best_token(logits: Logits) -> int:
    token = int(logits.argmax())
    _check_numbers(float(logits[token]))
    if logits[token] == -np.inf:
        raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, NOTHING_LEFT)
    return token


def _check_numbers(largest: float) -> None:
    """Refuse logits of which the largest is no number; it is NaN when any is."""
    if isnan(largest) or largest == inf:
        raise JobRejected(ErrorCode.DECODE_FAILED, "the model computed logits that are no numbers")
