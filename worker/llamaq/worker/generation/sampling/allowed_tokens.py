"""The tokens that the grammar and the reasoning budget of a job allow next."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.worker.generation.grammar.token_constraint import TokenConstraint
from llamaq.worker.generation.sampling.candidates import Candidates, Logits
from llamaq.worker.generation.sampling.reasoning_budget import ReasoningBudget

FEW_ALLOWED = 1 / 8
"""If a grammar allows at most this share of the vocabulary, only the logits of the allowed tokens are read."""
NO_TOKEN_LEFT = "no token of the vocabulary is allowed here"


class AllowedTokens:
    """Restricts the candidates of a job.

    Threads: the engine thread calls all methods. Another thread may call `prepare` at the same time.

    Args:
        grammar: Restricts the tokens. None: all are allowed.
        reasoning: Bounds the reasoning. None: it is not bounded.
        only_best: Whether only the candidate with the largest logit is needed.
    """

    def __init__(self, grammar: TokenConstraint | None, reasoning: ReasoningBudget | None, *, only_best: bool) -> None:
        self._grammar = grammar
        self._reasoning = reasoning
        self._only_best = only_best
        self._lock = Lock()
        """Held while the grammar reads tokens or computes a mask."""
        self._error: Exception | None = None
        """The error of `prepare`, after which the state of the grammar is not known."""

    def prepare(self, history: Sequence[int], n_prompt: int) -> None:
        """Compute the mask for the token that follows `history`. An error is raised by the next `restrict`."""
        if self._grammar is None:
            return
        try:
            self._mask(self._grammar, history, n_prompt)
        except Exception as exc:  # noqa: BLE001 - an error in one sampler must not end other jobs
            self._error = exc

    def _mask(self, grammar: TokenConstraint, history: Sequence[int], n_prompt: int) -> npt.NDArray[np.bool_]:
        with self._lock:
            if self._error is not None:
                raise self._error
            grammar.accept(history[n_prompt:])
            return grammar.allowed_mask()

    def restrict(self, logits: Logits, history: Sequence[int], n_prompt: int) -> Candidates:
        """Return the allowed tokens. If these are many, return the whole vocabulary, in which the logits of the other
        tokens are masked. Changes `logits`.

        Args:
            logits: The logits of the whole vocabulary.
            history: The prompt, then the generated tokens.
            n_prompt: The length of the prompt in tokens.

        Raises:
            JobRejected: The grammar does not allow the history, or is too complex.
        """
        forced = None if self._reasoning is None else self._reasoning.forced_token(history, n_prompt)
        if self._grammar is None:
            return Candidates(logits) if forced is None else Candidates.only(forced)
        mask = self._mask(self._grammar, history, n_prompt)
        if forced is not None and mask[forced]:
            return Candidates.only(forced)
        if self._only_best and mask[best := int(logits.argmax())]:  # usual, and much faster than masking
            return Candidates(logits[best : best + 1], np.array([best]))
        if np.count_nonzero(mask) > FEW_ALLOWED * logits.size:
            np.copyto(logits, -np.inf, where=~mask)
            return Candidates(logits)
        tokens = mask.nonzero()[0]
        return Candidates(logits.take(tokens), tokens)

    def end_token(self) -> int:
        """Return an end token, although it is masked, because no other token is left.

        Raises:
            JobRejected: There is no grammar, or it does not allow the end yet.
        """
        token = None if self._grammar is None else self._grammar.end_token()
        if token is None:
            raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, NO_TOKEN_LEFT)
        return token

    def close(self) -> None:
        """Free the memory of the grammar. May be called twice."""
        self._grammar = None
