"""The changes to logits that a request asks for: its bias, and the tokens that are not drawn at a position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import numpy as np

from llamaq.worker.generation.sampling.bad_words import BadWords
from llamaq.worker.generation.sampling.candidates import Candidates, Logits
from llamaq.worker.generation.sampling.logit_adjustment import LogitAdjustment, mask


class LogitChanges:
    """Adds a bias to the logits of some tokens, and masks others, for the draw after a history.

    Attributes:
        has_bias: Whether there is a bias.
        raises_logits: Whether the bias raises a logit.
        n_changed: Number of tokens whose logits change, at most.
        depends_on_history: Whether some tokens are masked only after certain tokens.
        unforced: The tokens that some draws mask, and the end tokens: none of them is drawn without its logit.

    Args:
        bias: Maps token ids to the values that are added to their logits.
        masked: The tokens that are always masked.
        end_tokens: The tokens that the first `min_tokens` draws mask too.
        min_tokens: Number of generated tokens before which no end token is drawn.
        bad_words: Sequences of tokens that are not drawn.
    """

    def __init__(
        self,
        bias: Mapping[int, float],
        masked: Iterable[int],
        *,
        end_tokens: frozenset[int],
        min_tokens: int,
        bad_words: BadWords,
    ) -> None:
        self._adjustment = LogitAdjustment(bias, bad_words.single_tokens.union(masked))
        self._min_tokens = min_tokens
        self._early_adjustment = self._adjustment
        """The adjustment of the first `min_tokens` draws."""
        if min_tokens:
            self._early_adjustment = LogitAdjustment(bias, self._adjustment.masked | end_tokens)
        self._bad_words = bad_words if bad_words.last_tokens else None
        """The bad words of several tokens. None: there are none."""
        self._maskable = self._early_adjustment.masked | bad_words.last_tokens
        """The tokens that some draws mask."""
        self.has_bias = self._adjustment.has_bias
        self.raises_logits = self._adjustment.raises_logits
        self.n_changed = self._early_adjustment.n_changed + len(bad_words.last_tokens)
        self.depends_on_history = self._bad_words is not None
        self.unforced = self._maskable | end_tokens

    def apply(self, logits: Logits, history: Sequence[int], n_prompt: int) -> None:
        """Change the logits of the vocabulary, in place.

        Raises:
            JobRejected: A masked logit is plus infinity or NaN, or a token of the bias is not in the vocabulary.
        """
        self._at(len(history) - n_prompt).apply(logits)
        if self._bad_words is not None:
            mask(logits, self._bad_words.completed_after(history, n_prompt))

    def apply_to_some(self, candidates: Candidates, history: Sequence[int], n_prompt: int) -> None:
        """Change the logits of candidates that are not the whole vocabulary, in ascending order of ids, in place."""
        self._at(len(history) - n_prompt).apply_to_some(candidates)
        if self._bad_words is not None:
            candidates.add(np.array(self._bad_words.completed_after(history, n_prompt), np.intp), -inf)

    def masks(self, token: int, history: Sequence[int], n_prompt: int) -> bool:
        """Whether a token is masked."""
        if token not in self._maskable:
            return False
        if token in self._at(len(history) - n_prompt).masked:
            return True
        return self._bad_words is not None and token in self._bad_words.completed_after(history, n_prompt)

    def masked_at(self, position: int) -> tuple[int, ...]:
        """Return the tokens, in ascending order, that are masked after any `position` generated tokens."""
        return self._at(position).row_masked

    def _at(self, position: int) -> LogitAdjustment:
        return self._adjustment if position >= self._min_tokens else self._early_adjustment

    def __repr__(self) -> str:
        return f"<LogitChanges {self._adjustment!r} min_tokens={self._min_tokens} bad_words={self._bad_words!r}>"
