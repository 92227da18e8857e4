"""A constraint that is compiled while the prompt of its job is computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from threading import Lock, current_thread, main_thread
from typing import TypeAlias

from llamaq.worker.generation.grammar.token_constraint import TokenConstraint
from llamaq.worker.generation.grammar.token_set import TokenSet


class PendingConstraint:
    """Stands for a constraint that is not compiled yet, and has its methods.

    The first call that needs the constraint compiles it, or waits for the thread that does. If it does not compile,
    this call and each later one raise the `JobRejected` of `ConstraintTokenizer.compile`.

    Threads: any thread may call `compile`. For the other methods see `TokenConstraint`.

    Args:
        compile_now: Compiles the constraint.
    """

    def __init__(self, compile_now: Callable[[], TokenConstraint]) -> None:
        self._compile_now = compile_now
        self._lock = Lock()
        """Held during the compilation."""
        self._constraint: TokenConstraint | None = None
        self._error: Exception | None = None
        self._only: TokenSet | None = None

    def compile(self) -> None:
        """Compile the constraint, unless that was done before. Raises no error: the call that needs it does."""
        with suppress(Exception):
            self._compiled()

    def _compiled(self) -> TokenConstraint:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._constraint is None:
                try:
                    self._constraint = self._compile_now()
                except Exception as exc:
                    self._error = exc
                    raise
                except BaseException as exc:
                    if isinstance(exc, KeyboardInterrupt) and current_thread() is main_thread():
                        raise  # Ctrl-C, which is no fault of the job
                    # The panic of a library in Rust is no `Exception`. It is the error of this job alone.
                    self._error = RuntimeError(f"the compilation ended with {type(exc).__name__}")
                    raise self._error from exc
                if self._only is not None:
                    self._constraint.restrict_to(self._only)
            return self._constraint

    def restrict_to(self, tokens: TokenSet) -> None:
        """Allow none but these tokens. Call it before any other method."""
        self._only = tokens

    @property
    def n_accepted(self) -> int:
        """Number of tokens of the output that the state has accepted: 0 before the compilation."""
        return 0 if self._constraint is None else self._constraint.n_accepted

    def accept(self, history: Sequence[int], n_prompt: int = 0, n_history: int | None = None) -> None:
        """See `TokenConstraint.accept`."""
        self._compiled().accept(history, n_prompt, n_history)

    def allowed_tokens(self) -> TokenSet:
        """See `TokenConstraint.allowed_tokens`."""
        return self._compiled().allowed_tokens()

    def allowed_along(self, draft: Sequence[int]) -> Iterator[TokenSet]:
        """See `TokenConstraint.allowed_along`."""
        return self._compiled().allowed_along(draft)

    def allowed_along_forced(self, n_max: int, never: Container[int] = ()) -> Iterator[TokenSet]:
        """See `TokenConstraint.allowed_along_forced`."""
        return self._compiled().allowed_along_forced(n_max, never)

    def end_token_in(self, allowed: TokenSet) -> int | None:
        """See `TokenConstraint.end_token_in`."""
        return self._compiled().end_token_in(allowed)

    def __repr__(self) -> str:
        return f"<PendingConstraint {'not compiled' if self._constraint is None else repr(self._constraint)}>"


Constraint: TypeAlias = TokenConstraint | PendingConstraint
"""Restricts the tokens of a job."""
