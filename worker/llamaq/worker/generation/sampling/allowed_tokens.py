"""The tokens that the grammar and the reasoning budget of a job allow next."""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import ceil, inf, isfinite
from threading import Lock

import numpy as np

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.worker.generation.grammar.token_constraint import TokenConstraint
from llamaq.worker.generation.grammar.token_set import TokenSet
from llamaq.worker.generation.sampling.candidates import Candidates, Logits
from llamaq.worker.generation.sampling.largest_logits import top_k_superset
from llamaq.worker.generation.sampling.reasoning_budget import ReasoningBudget

FEW_ALLOWED = 1 / 8
"""If a grammar allows at most this share of the vocabulary, only the logits of the allowed tokens are read."""
MAX_TRIES = 4
"""How many tokens with the largest logits are tried one by one, before the logits of the other tokens are masked."""
MAX_BEST = 256
"""With more candidates, finding them among the tokens that are not allowed takes as long as masking those tokens."""
MAX_FORCED = 16
"""Largest number of forced tokens in one tick, so that the streams of other jobs do not pause."""
MARGIN = 1.5
"""The factor by which more tokens are searched than are needed, because some of them may not be allowed."""
NO_TOKEN_LEFT = "no token of the vocabulary is allowed here"


class AllowedTokens:
    """Restricts the candidates of a job.

    Threads: the engine thread calls all methods. Another thread may call `prepare` at the same time.

    Args:
        grammar: Restricts the tokens. None: all are allowed.
        reasoning: Bounds the reasoning. None: it is not bounded.
        n_best: Number of candidates that are needed: those with the largest logits. None: all.
        can_force: Whether a token is drawn without its logits if the grammar allows no other.
        never: Tokens that are drawn only if nothing else is left, and never without their logits.
    """

    def __init__(
        self,
        grammar: TokenConstraint | None,
        reasoning: ReasoningBudget | None,
        *,
        n_best: int | None = None,
        can_force: bool = False,
        never: Container[int] = (),
    ) -> None:
        self._grammar = grammar
        self._reasoning = reasoning
        self._n_best = n_best if n_best is not None and n_best <= MAX_BEST else None
        self._n_forced_max = MAX_FORCED if can_force else 0
        self._never = never
        self._lock = Lock()
        """Held while the grammar reads tokens or computes masks."""
        self._is_awaited = False
        """Whether a draw waits for the lock."""
        self._error: Exception | None = None
        """The error of `prepare`, after which the state of the grammar is not known."""
        self._ahead: list[TokenSet] = []
        """What is allowed after the tokens that the grammar has accepted, and after each token of the path."""
        self._path_start = 0
        """Number of generated tokens before the path."""
        self._path: Sequence[int] = ()
        """The tokens along which masks are computed ahead: a draft, or forced tokens."""
        self._path_is_forced = False
        """Whether the path consists of forced tokens."""
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
                return  # the draw was faster
            if not draft and self._has_forced(history, n_prompt, n_history):
                return
            try:
                grammar.accept(history, n_prompt, n_history)
                self._look_ahead(grammar, n_generated, draft)
            except Exception as exc:  # noqa: BLE001 - an error in one sampler must not end other jobs
                self._error = exc

    def _look_ahead(self, grammar: TokenConstraint, n_generated: int, draft: Sequence[int]) -> None:
        """Store what is allowed along the draft, or along the forced tokens if there is no draft."""
        self._ahead, self._path_start, self._path, self._path_is_forced = [], n_generated, draft, False
        if draft or not self._n_forced_max:
            sets = grammar.allowed_along(draft)
        else:
            sets = grammar.allowed_along_forced(self._n_forced_max, self._never)
        for allowed in sets:
            if _are_few(allowed):
                allowed.ids()  # stores them
            self._ahead.append(allowed)
            if self._is_awaited:  # the draw may refuse the draft
                break
        if not draft:
            self._path = [int(allowed.ids()[0]) for allowed in self._ahead[:-1]]
            self._path_is_forced = bool(self._path)

    def _has_ahead(self, history: Sequence[int], n_prompt: int, n_history: int) -> bool:
        """Return whether it is known what is allowed after the first `n_history` tokens of `history`."""
        start = n_prompt + self._path_start
        place = n_history - start
        return 0 <= place < len(self._ahead) and list(history[start:n_history]) == list(self._path[:place])

    def _has_forced(self, history: Sequence[int], n_prompt: int, n_history: int) -> bool:
        """Return whether it is known which tokens are forced after the first `n_history` tokens of `history`.

        After the last known one, the search continues if its bound or a draw has ended it.
        """
        if not self._path_is_forced or not self._has_ahead(history, n_prompt, n_history):
            return False
        place = n_history - n_prompt - self._path_start
        return place < len(self._path) or self._ahead[place].only() is None

    def forced(self, history: Sequence[int], n_prompt: int) -> Sequence[int]:
        """Return the tokens that must follow `history`, as far as `prepare` has found them."""
        with self._lock:
            is_known = self._error is None and self._has_ahead(history, n_prompt, len(history))
            if not self._path_is_forced or not is_known:
                return ()
            return self._path[len(history) - n_prompt - self._path_start :]

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
        if _are_few(allowed):
            return Candidates(logits.take(allowed.ids()), allowed.ids())
        best = None if self._n_best is None else _find_best(logits, allowed, self._n_best)
        if best is not None:
            return best
        allowed.mask_others(logits)
        return Candidates(logits)

    def end_token(self) -> int:
        """Return an end token, although it is masked, because no other token is left for the last draw.

        Raises:
            JobRejected: There is no grammar, or it does not allow the end yet.
        """
        grammar, newest = self._grammar, self._newest
        token = None if grammar is None or newest is None else grammar.end_token_in(newest)
        if token is None:
            raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, NO_TOKEN_LEFT)
        return token

    def close(self) -> None:
        """Free the memory of the grammar. May be called twice."""
        self._grammar = None

    def _next(self, history: Sequence[int], n_prompt: int) -> tuple[int | None, TokenSet | None]:
        """Return the token that must follow `history`, if there is one, and the tokens that the grammar allows."""
        forced = None if self._reasoning is None else self._reasoning.forced_token(history, n_prompt)
        if self._grammar is None:
            return forced, None
        allowed = self._in_grammar(self._grammar, history, n_prompt)
        return (forced if forced is not None and forced in allowed else None), allowed

    def _in_grammar(self, grammar: TokenConstraint, history: Sequence[int], n_prompt: int) -> TokenSet:
        self._is_awaited = True
        with self._lock:
            self._is_awaited = False
            if self._error is not None:
                raise self._error
            self._n_drawn = len(history) - n_prompt + 1
            place = len(history) - n_prompt - self._path_start
            if place > 0 and self._has_ahead(history, n_prompt, len(history)):
                self._newest = self._ahead[place]
            else:
                grammar.accept(history, n_prompt)
                self._newest = grammar.allowed_tokens()
            return self._newest


def _are_few(allowed: TokenSet) -> bool:
    return len(allowed) <= FEW_ALLOWED * allowed.n_vocab


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
