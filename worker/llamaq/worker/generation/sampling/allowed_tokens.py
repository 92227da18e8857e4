"""The tokens that the grammar, the reasoning budget and `allowed_token_ids` of a job allow next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil, inf, isfinite
from threading import Lock

import numpy as np

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.worker.generation.grammar.pending_constraint import Constraint
from llamaq.worker.generation.grammar.token_set import TokenSet
from llamaq.worker.generation.sampling.candidates import Candidates, Logits
from llamaq.worker.generation.sampling.largest_logits import top_k_superset
from llamaq.worker.generation.sampling.look_ahead import LookAhead
from llamaq.worker.generation.sampling.reasoning_budget import ReasoningBudget

MAX_TRIES = 4
"""How many tokens with the largest logits are tried one by one, before the logits of the other tokens are masked."""
MAX_BEST = 256
"""With more candidates, finding them among the tokens that are not allowed takes as long as masking those tokens."""
MAX_FORCED = 16
"""Largest number of forced tokens in one tick, so that the streams of other jobs do not pause."""
MARGIN = 1.5
"""Ratio of searched tokens to needed tokens. Some searched tokens may not be allowed."""
NO_TOKEN_LEFT = "no token of the vocabulary is allowed here"
NO_LISTED_TOKEN_LEFT = "allowed_token_ids: none of these tokens is allowed here by the grammar and by the masks"


class AllowedTokens:
    """Restricts the candidates of a job.

    Threads: the engine thread calls all methods. Another thread may call `prepare` at the same time.

    Args:
        grammar: Restricts the tokens. None: all are allowed.
        reasoning: Bounds the reasoning. None: it is not bounded.
        only: The only tokens that are allowed. None: all are.
        n_best: Number of candidates that are needed: those with the largest logits. None: all.
        can_force: Whether a token is drawn without its logits if the grammar allows no other.
        never: Tokens that are never drawn without their logits.
        end_tokens: Tokens that end the job.
        min_tokens: The reasoning does not force an end token before this number of generated tokens.
    """

    def __init__(
        self,
        grammar: Constraint | None,
        reasoning: ReasoningBudget | None,
        *,
        only: TokenSet | None = None,
        n_best: int | None = None,
        can_force: bool = False,
        never: Collection[int] = (),
        end_tokens: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        if grammar is not None and only is not None:
            grammar.restrict_to(only)
        self._grammar = grammar
        self._reasoning = reasoning
        self._only = only
        self._end_tokens = end_tokens
        self._min_tokens = min_tokens
        self._n_best = n_best if n_best is not None and n_best <= MAX_BEST else None
        self._look_ahead = LookAhead(MAX_FORCED if can_force else 0, never)
        self._lock = Lock()
        """Held while the grammar reads tokens or computes masks, and while the look-ahead is used."""
        self._error: Exception | None = None
        """The error of `prepare`, after which the state of the grammar is not known."""
        self._newest: TokenSet | None = None
        """What the grammar allows where a token was drawn last."""
        self._n_drawn = 0
        """Number of generated tokens after the last draw."""

    def prepare(self, history: Sequence[int], n_prompt: int, n_history: int, draft: Sequence[int]) -> None:
        """Find the tokens that the grammar allows after the first `n_history` tokens of `history`, and after each token
        of a draft that follows them, until a draw waits for them. An error is raised by the next `restrict`.

        Without a draft, find the forced tokens: those that follow while the grammar allows a single token.
        """
        grammar, n_generated = self._grammar, n_history - n_prompt
        if grammar is None:
            return
        with self._lock:
            if self._error is not None or n_generated < max(grammar.n_accepted, self._n_drawn):
                return  # a draw has passed this position meanwhile
            if not draft and self._look_ahead.has_forced_after(history, n_prompt, n_history):
                return
            try:
                grammar.accept(history, n_prompt, n_history)
                self._look_ahead.search(grammar, n_generated, draft)
            except Exception as exc:  # noqa: BLE001 - an error in one sampler must not end other jobs
                self._error = exc

    def forced(self, history: Sequence[int], n_prompt: int) -> Sequence[int]:
        """Return the tokens that must follow `history`, as far as `prepare` has found them."""
        with self._lock:
            return () if self._error is not None else self._look_ahead.forced_after(history, n_prompt)

    def allows(self, token: int, history: Sequence[int], n_prompt: int) -> bool:
        """Whether `token` may follow `history`. Raises like `restrict`."""
        forced, allowed = self._next(history, n_prompt)
        if forced is not None:
            return token == forced
        return allowed is None or token in allowed

    def restrict(self, logits: Logits, history: Sequence[int], n_prompt: int) -> Candidates:
        """Return the candidates of the next draw. Changes `logits`.

        If few tokens are allowed, these are the allowed tokens. Otherwise they are at least the `n_best` allowed tokens
        with the largest logits, or the whole vocabulary, in which the logits of forbidden tokens are masked.

        Args:
            logits: The logits of the whole vocabulary.
            history: The prompt, then the generated tokens.
            n_prompt: The length of the prompt in tokens.

        Raises:
            JobRejected: The grammar does not allow the history, or is too complex.
        """
        forced, allowed = self._next(history, n_prompt)
        if forced is not None:
            return Candidates.only(forced)
        if allowed is None:
            return Candidates(logits)
        if allowed.is_small:
            return Candidates(logits.take(allowed.ids()), allowed.ids())
        best = None if self._n_best is None else _find_best(logits, allowed, self._n_best)
        if best is not None:
            return best
        allowed.mask_others(logits)
        return Candidates(logits)

    def end_token(self) -> int:
        """Return an end token, although it is masked, because no other token is left for the last draw.

        Where the grammar can end, this is an end token of the model.

        Raises:
            JobRejected: There is no grammar, or it allows no end token here.
        """
        grammar, newest = self._grammar, self._newest
        token = None if grammar is None or newest is None else grammar.end_token_in(newest)
        if token is None and newest is not None:
            token = next((each for each in sorted(self._end_tokens) if each in newest), None)
        if token is None:
            raise JobRejected(
                ErrorCode.GRAMMAR_EXHAUSTED, NO_TOKEN_LEFT if self._only is None else NO_LISTED_TOKEN_LEFT
            )
        return token

    def close(self) -> None:
        """Free the memory of the grammar. May be called twice."""
        self._grammar = None

    def _next(self, history: Sequence[int], n_prompt: int) -> tuple[int | None, TokenSet | None]:
        """Return the token that must follow `history`, if there is one, and the allowed tokens. None: all are."""
        forced = None if self._reasoning is None else self._reasoning.forced_token(history, n_prompt)
        allowed = self._only if self._grammar is None else self._in_grammar(self._grammar, history, n_prompt)
        if forced is None or (allowed is not None and forced not in allowed):
            return None, allowed
        is_too_early = len(history) - n_prompt < self._min_tokens and forced in self._end_tokens
        return (None if is_too_early else forced), allowed

    def _in_grammar(self, grammar: Constraint, history: Sequence[int], n_prompt: int) -> TokenSet:
        self._look_ahead.is_awaited = True
        with self._lock:
            self._look_ahead.is_awaited = False
            if self._error is not None:
                raise self._error
            self._n_drawn = len(history) - n_prompt + 1
            allowed = self._look_ahead.allowed_after(history, n_prompt)
            if allowed is None:
                grammar.accept(history, n_prompt)
                allowed = grammar.allowed_tokens()
            self._newest = allowed
            return allowed


def _find_best(logits: Logits, allowed: TokenSet, n_best: int) -> Candidates | None:
    """Return at least the `n_best` allowed tokens with the largest logits, in ascending order of ids.

    The largest logits of the whole vocabulary mostly belong to allowed tokens, and to find these takes much less time
    than to mask all others. May mask logits of tokens that are not allowed. None: too few of the largest logits belong
    to allowed tokens.
    """
    if n_best == 1:
        for _ in range(MAX_TRIES):
            best = int(logits.argmax())
            if best in allowed:
                return Candidates(logits[best : best + 1], np.array([best]))
            logits[best] = -inf
        return None
    tokens, largest = top_k_superset(logits, ceil(MARGIN * n_best))
    if not isfinite(largest):
        return None
    tokens = tokens[allowed.contained(tokens)]
    return Candidates(logits.take(tokens), tokens) if tokens.size >= n_best else None
