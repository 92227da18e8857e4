"""The changes to logits that a request asks for by token id: its bias, and tokens that are not drawn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf, isnan

import numpy as np

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.worker.core.finish_rules import NOT_NUMBERS
from llamaq.worker.generation.sampling.candidates import Candidates, Logits

FEW_MASKED = 8
"""Up to this number of masked tokens, setting one logit after the other takes less time than one numpy call."""


_NO_TOKENS = np.empty(0, np.int64)
_NO_VALUES = np.empty(0, np.float32)


class LogitAdjustment:
    """Adds a bias to the logits of some tokens, and masks others.

    Attributes:
        masked: The tokens that are masked.
        row_masked: The same in ascending order, for `RowDraw`.
        has_bias: Whether there is a bias.
        raises_logits: Whether the bias raises a logit.
        n_changed: Number of tokens whose logits change, at most.

    Args:
        bias: Maps token ids to the values that are added to their logits.
        masked: The tokens to mask.
    """

    def __init__(self, bias: Mapping[int, float], masked: Iterable[int]) -> None:
        self.masked = frozenset(masked)
        self.row_masked = tuple(sorted(self.masked))
        self.has_bias = bool(bias)
        self.raises_logits = any(value > 0 for value in bias.values())
        self.n_changed = len(bias) + len(self.masked)
        # Most jobs have neither a bias nor masked tokens, and a call of numpy takes a microsecond.
        self._bias_tokens = np.fromiter(bias, np.int64) if bias else _NO_TOKENS
        self._bias = np.fromiter(bias.values(), np.float32) if bias else _NO_VALUES
        self._masked = np.fromiter(self.masked, np.int64) if self.masked else _NO_TOKENS

    def apply(self, logits: Logits) -> None:
        """Change the logits of the vocabulary, in place: copying logits takes longer than sampling.

        Raises:
            JobRejected: A masked logit is plus infinity or NaN, or a token of the bias is not in the vocabulary.
        """
        if self.has_bias:
            if self._bias_tokens.max() >= logits.size:
                message = f"logit_bias has token {self._bias_tokens.max()}, but the vocabulary has {logits.size} tokens"
                raise JobRejected(ErrorCode.INVALID_TOKEN, message)
            logits[self._bias_tokens] += self._bias
        if len(self.masked) <= FEW_MASKED:
            mask(logits, self.masked)
        else:
            check_finite(float(logits.take(self._masked).sum(dtype=np.float64)))  # the mask would hide it
            logits[self._masked] = -inf

    def apply_to_some(self, candidates: Candidates) -> None:
        """Change the logits of candidates that are not the whole vocabulary, in ascending order of ids, in place."""
        if self.has_bias:
            candidates.add(self._bias_tokens, self._bias)
        if self.masked:
            candidates.add(self._masked, -inf)

    def __repr__(self) -> str:
        return f"<LogitAdjustment {self._bias.size} with bias, {len(self.masked)} masked>"


def mask(logits: Logits, tokens: Collection[int]) -> None:
    """Set the logits of a few tokens to minus infinity, in place.

    Raises:
        JobRejected: One of these logits is plus infinity or NaN, which the mask would hide.
    """
    hidden = 0.0
    for token in tokens:
        hidden += logits.item(token)
        logits[token] = -inf
    check_finite(hidden)


def check_finite(largest: float) -> None:
    """Raise `JobRejected` if the largest logit is plus infinity or NaN. It is NaN if any logit is NaN."""
    if isnan(largest) or largest == inf:
        raise JobRejected(ErrorCode.DECODE_FAILED, NOT_NUMBERS)
