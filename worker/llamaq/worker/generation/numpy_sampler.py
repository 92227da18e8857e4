"""Draws tokens from logits: the sampler chain of llama.cpp in numpy, with reproducible draws.

The steps of the chain have the order of llama.cpp (common/sampling.cpp): logit bias, penalties, grammar, top-n-sigma,
top-k, typical-p, top-p, min-p, XTC, temperature. Only the draws differ: the random number is a hash of the seed and
the position. So an attempt that resumes a job draws with the same random numbers as an uninterrupted attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import inf, isnan

import numpy as np

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.protocol.token_logprobs import TokenLogprobs
from llamaq.worker.generation.candidate_filters import (
    Candidates,
    Logits,
    dynamic_temperature,
    exclude_top_choices,
    mask_below_sigma,
    top_k,
    top_p_min_p,
    typical_p,
    unmasked_candidates,
)
from llamaq.worker.generation.grammar.token_constraint import TokenConstraint
from llamaq.worker.generation.logprobs import token_logprobs

FEW_ALLOWED = 1 / 8
"""If a grammar allows at most this share of the vocabulary, only the logits of the allowed tokens are read."""
GREEDY_BELOW = 1e-6
"""Temperatures below this value mean greedy decoding. Logits divided by such a temperature can exceed the range of
float32."""
XTC = b"xtc"
"""Purpose of the random number that decides whether XTC is applied."""
NO_TOKEN_LEFT = "no token of the vocabulary is allowed here"


class LogitSampler:
    """The sampler of one job; implements `core.job.Sampler`.

    Args:
        params: The sampling parameters.
        seed: The seed of the draws.
        logit_bias: Maps token ids to the values that are added to their logits.
        masked_tokens: Tokens that are never drawn, such as the end tokens for `ignore_eos`.
        grammar: Restricts the tokens.
        n_logprobs: Number of alternatives in `logprobs`. None: `logprobs` is always None.
    """

    def __init__(
        self,
        params: SamplingDefaults,
        *,
        seed: int,
        logit_bias: Mapping[int, float] | None = None,
        masked_tokens: Iterable[int] = (),
        grammar: TokenConstraint | None = None,
        n_logprobs: int | None = None,
    ) -> None:
        self.logprobs: TokenLogprobs | None = None
        self._n_logprobs = n_logprobs
        self._params = params
        self._seed = seed.to_bytes(8, "little")
        self._bias_tokens = np.fromiter(logit_bias or (), np.int64)
        self._bias = np.fromiter((logit_bias or {}).values(), np.float32)
        self._masked = np.fromiter(masked_tokens, np.int64)
        self._grammar = grammar
        self._has_penalties = params.penalty_last_n != 0 and (
            params.repeat_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )

    def sample(self, logits: Logits, history: Sequence[int], n_prompt: int) -> int:
        """Draw the token that follows `history`; see `core.job.Sampler`. Changes `logits`."""
        if self._n_logprobs is None:
            return self._sample(logits, history, n_prompt)
        computed = logits.copy()
        token = self._sample(logits, history, n_prompt)
        self.logprobs = token_logprobs(computed, token, self._n_logprobs)
        return token

    def _sample(self, logits: Logits, history: Sequence[int], n_prompt: int) -> int:
        self._adjust(logits, history)
        if self._grammar is not None:
            return self._sample_with_grammar(self._grammar, logits, history[n_prompt:])
        if self._is_greedy:
            return _best_token(logits)
        return self._draw(self._candidates(logits), len(history) - n_prompt)

    def close(self) -> None:
        """Free the memory of the grammar. May be called twice."""
        self._grammar = None

    @property
    def _is_greedy(self) -> bool:
        return self._params.temperature < GREEDY_BELOW

    def _sample_with_grammar(self, grammar: TokenConstraint, logits: Logits, generated: Sequence[int]) -> int:
        """Draw from the tokens that the grammar allows."""
        grammar.accept(generated)
        mask = grammar.allowed_mask()
        tokens = np.flatnonzero(mask)
        if len(tokens) > FEW_ALLOWED * logits.size:
            np.copyto(logits, -np.inf, where=~mask)
            return self._draw(self._candidates(logits), len(generated))
        allowed = Candidates(tokens, logits[tokens])
        n_wanted = 1 if self._is_greedy else self._params.top_k
        return self._draw(allowed.largest(n_wanted) if n_wanted else allowed, len(generated))

    def _candidates(self, logits: Logits) -> Candidates:
        if self._params.top_n_sigma > 0 and not self._is_greedy:
            mask_below_sigma(logits, self._params.top_n_sigma)
        k = 1 if self._is_greedy else self._params.top_k
        return top_k(logits, k) if k else unmasked_candidates(logits)

    def _filter(self, candidates: Candidates, position: int) -> Candidates:
        params = self._params
        if params.typical_p < 1:
            candidates = typical_p(candidates, params.typical_p)
        candidates = top_p_min_p(candidates, params.top_p, params.min_p)
        if params.xtc_probability > 0 and self._uniform(position, XTC) < params.xtc_probability:
            candidates = exclude_top_choices(candidates, params.xtc_threshold)
        return candidates

    def _weights(self, candidates: Candidates) -> Logits:
        """Return exp((logit_i - max_logit) / temperature): the probabilities before normalization.

        Source: llama_sampler_temp_ext, then llama_sampler_softmax_impl.
        """
        params, temperature = self._params, self._params.temperature
        if params.dynatemp_range > 0:
            temperature = dynamic_temperature(candidates, temperature, params.dynatemp_range, params.dynatemp_exponent)
        weights: Logits = np.exp(
            (candidates.logits - np.float32(candidates.max_logit)) / np.float32(max(temperature, GREEDY_BELOW))
        )
        return weights

    def _draw(self, candidates: Candidates, position: int) -> int:
        """Filter the candidates, and draw one by inverse transform sampling.

        The candidates are in ascending order of ids. The first candidate with cumulative weight > u * total weight is
        drawn, where u is the random number of this position.
        """
        if not len(candidates):
            raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, NO_TOKEN_LEFT)
        _check_finite(candidates.max_logit)
        if self._is_greedy:
            return int(candidates.tokens[0])
        kept = self._filter(candidates, position)
        cumulative = np.cumsum(self._weights(kept), dtype=np.float64)
        index = int(cumulative.searchsorted(self._uniform(position) * cumulative[-1], side="right"))
        return int(kept.tokens[min(index, len(kept) - 1)])  # rounding can make the product equal to the total

    def _uniform(self, position: int, purpose: bytes = b"") -> float:
        """Return a uniform random number in [0, 1) that depends only on the seed, the position and its purpose.

        The number is the upper 53 bits of the 64-bit BLAKE2b hash of the position, with the seed as the key and the
        purpose as the personalization, divided by 2**53.
        """
        digest = blake2b(position.to_bytes(8, "little"), digest_size=8, key=self._seed, person=purpose).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def _adjust(self, logits: Logits, history: Sequence[int]) -> None:
        """Apply bias, penalties and mask to the logits, in place: copying logits takes longer than sampling."""
        if self._bias_tokens.size:
            if self._bias_tokens.max() >= logits.size:
                message = f"logit_bias has token {self._bias_tokens.max()}, but the vocabulary has {logits.size} tokens"
                raise JobRejected(ErrorCode.INVALID_TOKEN, message)
            logits[self._bias_tokens] += self._bias
        if self._has_penalties:
            self._penalize(logits, history)
        if self._masked.size:
            logits[self._masked] = -np.inf

    def _penalize(self, logits: Logits, history: Sequence[int]) -> None:
        """Lower the logits of the tokens that occur in the last `penalty_last_n` tokens of the history, in place.

        new_logit_i = scaled_i - count_i * frequency_penalty - presence_penalty, where count_i is the number of
        occurrences of token i, and scaled_i is logit_i * repeat_penalty if logit_i <= 0, otherwise
        logit_i / repeat_penalty. Source: llama_sampler_penalties_apply.
        """
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
    """Return the token with the largest logit."""
    token = int(logits.argmax())
    _check_finite(float(logits[token]))
    if logits[token] == -np.inf:
        raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, NO_TOKEN_LEFT)
    return token


def _check_finite(largest: float) -> None:
    """Raise `JobRejected` if the largest logit is plus infinity or NaN. It is NaN if any logit is NaN."""
    if isnan(largest) or largest == inf:
        raise JobRejected(ErrorCode.DECODE_FAILED, "the model computed logits that are not finite numbers")
