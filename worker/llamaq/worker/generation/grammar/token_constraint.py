"""Restricts the tokens of one job to a grammar, with llguidance.

llguidance needs much memory and time for some grammars. So only a grammar that the `GrammarSandbox` has accepted may be
used.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from copy import copy
from typing import Self, TypeVar

import llguidance

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.worker.generation.grammar.grammar_vocabulary import GrammarVocabulary
from llamaq.worker.generation.grammar.large_stack import on_large_stack
from llamaq.worker.generation.grammar.token_set import TokenSet

T = TypeVar("T")

LIMITS = llguidance.LLParserLimits(step_max_items=5000, verbose_errors=False)
"""Bounds of one step. 5,000 items of the parser take 0.3 ms, or up to 45 ms in the most ambiguous grammars. If a
grammar needs more items, its job fails."""
IN_STRING = r'[^"\\\x00-\x1F\x7F]'
"""A character that a string of JSON may contain without an escape."""
SLICES = (IN_STRING + "{1,10}", IN_STRING + "+")
"""Kinds of tokens that llguidance allows or forbids as a whole, so that inside a string it need not try each token.
Each kind takes 8 MB with a vocabulary of 151,936 tokens. The other kinds that llguidance has by default are white space
and at most 30 characters. They have few tokens, and masks take as long without them (bench/json_schema_masks.py)."""
MAX_STEP_S = 1.0
"""If one step takes more processor time than this, the job fails, because the next steps could take as long."""
MAX_RESTART_S = 0.5
"""How much processor time all copies of a constraint together may take to continue with other lexers: the grammar is
compiled again, and accepted tokens are read again, beside a tick. A usual grammar takes some milliseconds for each
copy; the most expensive ones take seconds, and much memory."""
DEAD_END = "NoExtension"
"""The beginning of llguidance's error if no token can continue the output."""
LEXER_ERROR = "lexer error"
"""The beginning of llguidance's error if a text exceeds a limit of the lexer."""
SMALLER_COUNTS = r"write smaller counted repetitions, such as \w{0,20} in place of (\w{0,999}){100}"
MAX_ERROR_CHARS = 300
MAX_COMPILED = 4
"""Number of grammars whose compiled form is kept. A usual JSON schema takes 0.25 MB and 2 ms to compile, so that
the last of 32 jobs with the same schema would wait for 60 ms. Few are kept, because the largest take 500 MB."""


class ConstraintTokenizer:
    """The tokens of a model in the form that llguidance needs. Compiles grammars. Thread-safe.

    Args:
        vocab: The model's vocabulary.
    """

    def __init__(self, vocab: GrammarVocabulary) -> None:
        tokens = _Tokens(vocab)
        self.n_tokens = len(vocab.pieces)
        self.end_tokens = vocab.end_tokens
        self._lock = threading.Lock()
        """Protects the next attribute. It is not held during a compilation."""
        self._compilations: OrderedDict[str, _Compilation] = OrderedDict()
        """Those of the grammars that were used last."""
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(tokens),
            n_vocab=self.n_tokens,
            eos_token=sorted(vocab.end_tokens) or None,
            slices=list(SLICES),
        )
        tokens.tokenizer = self._tokenizer

    def compile(self, grammar: str) -> TokenConstraint:
        """Compile a grammar, and compute the tokens that it allows first.

        Args:
            grammar: The text that `GrammarSandbox.check` returns.

        Raises:
            JobRejected: The grammar does not compile.
        """
        with self._lock:
            one = self._compilations.pop(grammar, None) or _Compilation()
            self._compilations[grammar] = one
            if len(self._compilations) > MAX_COMPILED:
                self._compilations.popitem(last=False)
        return one.copy_of(lambda: on_large_stack(lambda: self.compile_on_this_stack(grammar)))

    def compile_on_this_stack(self, grammar: str) -> TokenConstraint:
        """Compile a grammar as `compile` does. The caller must run on a thread with a stack of `STACK_BYTES`."""
        started_s = time.thread_time()
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        constraint = TokenConstraint(self, matcher, grammar)
        constraint.lexer.compilation_s = time.thread_time() - started_s
        return constraint

    def __repr__(self) -> str:
        return f"<ConstraintTokenizer {self.n_tokens} tokens>"


class _Compilation:
    """The compilation of one grammar. Jobs with the same grammar wait for it; others do not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held during the compilation."""
        self._first: TokenConstraint | None = None
        """The first state of the grammar. Jobs get copies of it."""
        self._error: JobRejected | None = None

    def copy_of(self, compile_now: Callable[[], TokenConstraint]) -> TokenConstraint:
        """Return a copy of the first state, compiled by `compile_now` if there is none that can be used.

        Raises:
            JobRejected: The grammar does not compile.
        """
        with self._lock:
            if self._error is not None:
                raise JobRejected(self._error.code, self._error.message)
            if self._first is None or self._first.lexer.has_failed:
                try:
                    self._first = compile_now()
                except JobRejected as exc:
                    self._error = exc
                    raise
            return self._first.copy()


class SharedLexer:
    """What is known of the lexer that the copies of a constraint share."""

    def __init__(self) -> None:
        self.has_failed = False
        """Whether a text of one of the copies has exceeded a limit of the lexer. Then llguidance accepts no more text
        with this lexer, also not of the other copies."""
        self.compilation_s = 0.0
        """Processor time that the compilation took."""
        self.restart_s_left = MAX_RESTART_S
        """Processor time that the copies may still take to continue with other lexers."""


class TokenConstraint:
    """A compiled grammar and its state after the accepted tokens. Not thread-safe."""

    def __init__(self, tokenizer: ConstraintTokenizer, matcher: llguidance.LLMatcher, grammar: str) -> None:
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._grammar = grammar
        self.lexer = SharedLexer()
        self._may_restart = False
        self._n_accepted = 0
        self._history: Sequence[int] = ()
        """Contains the accepted tokens, from `_n_prompt` on."""
        self._n_prompt = 0
        self._allowed: TokenSet | None = None
        self._only: TokenSet | None = None
        self._check("the grammar cannot be used")
        self._allowed = self._compute_allowed()
        if not self._allowed:
            message = "the grammar cannot be used: no token of this model's vocabulary is allowed first"
            raise JobRejected(ErrorCode.INVALID_GRAMMAR, message)

    def copy(self) -> Self:
        """Return an independent constraint in the same state."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        other._may_restart = True
        return other

    def restrict_to(self, tokens: TokenSet) -> None:
        """Allow none but these tokens from now on."""
        self._only = tokens
        if self._allowed is not None:
            self._allowed = self._allowed & tokens

    @property
    def n_accepted(self) -> int:
        """Number of tokens of the output that the state has accepted."""
        return self._n_accepted

    def resume(self, tokens: Sequence[int]) -> None:
        """Advance the state by the tokens of earlier attempts, one at a time, so that the time of each is bounded.

        Raises:
            JobRejected: See `accept`.
        """
        for n_tokens in range(1, len(tokens) + 1):
            self.accept(tokens, n_history=n_tokens)

    def accept(self, history: Sequence[int], n_prompt: int = 0, n_history: int | None = None) -> None:
        """Advance the state by the generated tokens that are not accepted yet.

        Args:
            history: The prompt, then all generated tokens.
            n_prompt: The length of the prompt in tokens.
            n_history: Number of tokens of the history to read. None: all.

        Raises:
            JobRejected: The grammar does not allow one of them, or a step takes more than `MAX_STEP_S`.
        """
        new = list(history[n_prompt + self._n_accepted : n_history])
        if not new:
            return
        self._allowed = None
        self._history, self._n_prompt = history, n_prompt
        n_valid = self._bounded(lambda: self._matcher.try_consume_tokens(new))
        self._n_accepted += n_valid
        if n_valid < len(new):
            if self._restart():
                self.accept(history, n_prompt, n_history)
                return
            self._check("the grammar is too complex")
            if self.lexer.has_failed:
                raise JobRejected(ErrorCode.INVALID_GRAMMAR, f"the grammar is too complex: {SMALLER_COUNTS}")
            message = f"the grammar does not allow token {new[n_valid]} at position {self._n_accepted} of the output"
            raise JobRejected(ErrorCode.GRAMMAR_EXHAUSTED, message)

    def allowed_tokens(self) -> TokenSet:
        """Return the tokens that the grammar allows next. End tokens are allowed where the grammar can end.

        Raises:
            JobRejected: The step takes more than `MAX_STEP_S`, or exceeds `LIMITS`.
        """
        if self._allowed is None:
            self._allowed = self._compute_allowed()
        return self._allowed

    def allowed_along(self, draft: Sequence[int]) -> Iterator[TokenSet]:
        """Yield the tokens that are allowed next, and those after each token of a draft. The state does not change.

        The iteration stops before a token of the draft that the grammar does not allow, or that would make the grammar
        too complex. This is no error, because the model may generate another token there.

        Raises:
            JobRejected: See `allowed_tokens`.
        """

        def choose(allowed: TokenSet, place: int) -> int | None:
            return draft[place] if place < len(draft) and draft[place] in allowed else None

        return self._allowed_along(choose)

    def allowed_along_forced(self, n_max: int, never: Container[int] = ()) -> Iterator[TokenSet]:
        """Yield the set of tokens that are allowed next. While a set has a single token, also yield the set after it.

        Args:
            n_max: Largest number of such single tokens.
            never: Tokens that are never forced, besides end tokens. The iteration stops at a set with only such a
                token.

        Raises:
            JobRejected: See `allowed_tokens`.
        """

        def choose(allowed: TokenSet, place: int) -> int | None:
            token = allowed.only() if place < n_max else None
            return None if token is None or token in never or token in self._tokenizer.end_tokens else token

        return self._allowed_along(choose)

    def _allowed_along(self, choose: Callable[[TokenSet, int], int | None]) -> Iterator[TokenSet]:
        """Yield the tokens that are allowed next, and those after each token that `choose` returns. The state does not
        change.

        Args:
            choose: Gets the last set and the number of tokens chosen so far. Returns a token of the set; None: stop.
        """
        allowed = self.allowed_tokens()
        yield allowed
        tokens: list[int] = []
        ahead: TokenConstraint | None = None
        with suppress(JobRejected):
            while (token := choose(allowed, len(tokens))) is not None:
                if ahead is None:
                    ahead = self.copy()
                    ahead._n_accepted, ahead._may_restart = 0, False
                tokens.append(token)
                ahead.accept(tokens)
                allowed = ahead.allowed_tokens()
                yield allowed

    def end_token_in(self, allowed: TokenSet) -> int | None:
        """Return an end token that is among the allowed tokens. None: the grammar cannot end here."""
        return next((token for token in sorted(self._tokenizer.end_tokens) if token in allowed), None)

    def _compute_allowed(self) -> TokenSet:
        bits = self._bounded(self._matcher.compute_bitmask)
        if self._matcher.is_error():
            if self._restart():
                return self._compute_allowed()
            if not self._matcher.get_error().startswith(DEAD_END):
                self._check("the grammar is too complex")
            return TokenSet.empty(self._tokenizer.n_tokens)
        allowed = TokenSet(bits, self._tokenizer.n_tokens)
        return allowed if self._only is None else allowed & self._only

    def _check(self, what: str) -> None:
        """Raise `JobRejected` if llguidance has found an error in the grammar, or has exceeded `LIMITS`."""
        if self._matcher.is_error():
            # The message repeats the grammar in its later lines.
            error = " ".join(self._matcher.get_error().partition("<non-verbose/>")[0].split())[:MAX_ERROR_CHARS]
            if self._has_lexer_failed():
                error = f"{error}; {SMALLER_COUNTS}"
            raise JobRejected(ErrorCode.INVALID_GRAMMAR, f"{what}: {error}")

    def _has_lexer_failed(self) -> bool:
        """Return whether a limit of the lexer is exceeded, by the text of this constraint or of another copy."""
        if self._matcher.is_error() and self._matcher.get_error().startswith(LEXER_ERROR):
            self.lexer.has_failed = True
        return self.lexer.has_failed

    def _restart(self) -> bool:
        """If the text of another copy has made the lexer fail, continue once with another lexer.

        Returns:
            Whether the constraint continues. Otherwise it is unchanged: it may not restart, its own text exceeds the
            limit, or the copies have taken too long for the thread of a tick.
        """
        failed = self.lexer
        is_cause = not failed.has_failed  # the copy whose text exceeds the limit is the first to see the error
        if is_cause or not self._may_restart or failed.compilation_s > failed.restart_s_left:
            self._has_lexer_failed()  # which the other copies must know
            return False
        self._may_restart = False
        fresh = on_large_stack(lambda: self._tokenizer.compile_on_this_stack(self._grammar))
        failed.restart_s_left -= fresh.lexer.compilation_s
        started_s = time.thread_time()
        has_read_all = self._read_again(fresh._matcher, started_s + failed.restart_s_left)
        failed.restart_s_left -= time.thread_time() - started_s
        if has_read_all:
            self._matcher, self.lexer = fresh._matcher, fresh.lexer
        return has_read_all

    def _read_again(self, matcher: llguidance.LLMatcher, end_s: float) -> bool:
        """Let a matcher read the accepted tokens. Returns False if it refuses one, or does not end before `end_s`."""
        accepted = self._history[self._n_prompt : self._n_prompt + self._n_accepted]
        return all(time.thread_time() < end_s and matcher.consume_token(token) for token in accepted)

    def _bounded(self, step: Callable[[], T]) -> T:
        """Return the result of a step. Raises `JobRejected` if it takes more than `MAX_STEP_S` of processor time."""
        started_s = time.thread_time()
        result = step()
        elapsed_s = time.thread_time() - started_s
        if elapsed_s > MAX_STEP_S:
            message = f"the grammar took {elapsed_s:.1f} s for one token: make it less ambiguous"
            raise JobRejected(ErrorCode.INVALID_GRAMMAR, message)
        return result

    def __repr__(self) -> str:
        return f"<TokenConstraint after {self._n_accepted} tokens>"


class _Tokens:
    """The tokens of a vocabulary with the attributes that `llguidance.TokenizerWrapper` reads.

    Where a grammar forces a text, llguidance allows only the first token of this text. The text is split into the
    longest tokens, because the tokenizer of a model adds a space in front of some texts.
    """

    def __init__(self, vocab: GrammarVocabulary) -> None:
        self.tokenizer: llguidance.LLTokenizer | None = None
        self.eos_token_id = vocab.eos if vocab.eos is not None else 0
        self.bos_token_id = vocab.bos
        self.tokens = vocab.pieces
        self.special_token_ids = sorted(vocab.pieces.hidden)
        """Only a Lark grammar that names them, such as `<|tool_call|>`, allows these tokens."""

    def __call__(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise TypeError("no bytes")  # the wrapper tries bytes once, and then passes only text
        return self.tokenizer.greedy_tokenize(text)
