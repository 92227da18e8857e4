"""What a grammar allows after tokens that are not drawn yet."""

from __future__ import annotations

from collections.abc import Container, Sequence

from llamaq.worker.generation.grammar.pending_constraint import Constraint
from llamaq.worker.generation.grammar.token_set import TokenSet


class LookAhead:
    """The tokens that a grammar allows along a path, which starts at a point of the history.

    The path is a draft. Without a draft, it consists of the forced tokens: those that follow while the grammar allows a
    single token.

    Threads: not thread-safe, but any thread may set `is_awaited`.

    Args:
        n_forced_max: Largest number of forced tokens in a path.
        never: Tokens that are never forced.
    """

    def __init__(self, n_forced_max: int, never: Container[int]) -> None:
        self.is_awaited = False
        """Whether a draw waits for the end of `search`."""
        self._n_forced_max = n_forced_max
        self._never = never
        self._start = 0
        """Number of generated tokens before the path."""
        self._path: Sequence[int] = ()
        self._is_forced = False
        """Whether the path consists of forced tokens."""
        self._sets: list[TokenSet] = []
        """What is allowed at the start of the path, and after each token of the path, as far as it was searched."""

    def search(self, grammar: Constraint, n_generated: int, draft: Sequence[int]) -> None:
        """Find what is allowed along a new path, until a draw waits.

        Args:
            grammar: The grammar, which has accepted the generated tokens.
            n_generated: Number of generated tokens.
            draft: The tokens that may follow. Empty: search the forced tokens.
        """
        self._start, self._path, self._is_forced, self._sets = n_generated, draft, False, []
        if draft or not self._n_forced_max:
            sets = grammar.allowed_along(draft)
        else:
            sets = grammar.allowed_along_forced(self._n_forced_max, self._never)
        for allowed in sets:
            if allowed.is_small:
                allowed.ids()  # the set keeps its ids, so the draw need not compute them
            self._sets.append(allowed)
            if self.is_awaited:  # the draw may reject the draft, so the rest of the search may be useless
                break
        if not draft:
            self._path = [int(allowed.ids()[0]) for allowed in self._sets[:-1]]
            self._is_forced = bool(self._path)

    def allowed_after(self, history: Sequence[int], n_prompt: int) -> TokenSet | None:
        """Return the tokens that are allowed after `history`. None: they are not known."""
        place = self._place(history, n_prompt, len(history))
        return None if place is None else self._sets[place]

    def forced_after(self, history: Sequence[int], n_prompt: int) -> Sequence[int]:
        """Return the tokens that must follow `history`, as far as they are known."""
        place = self._place(history, n_prompt, len(history)) if self._is_forced else None
        return () if place is None else self._path[place:]

    def has_forced_after(self, history: Sequence[int], n_prompt: int, n_history: int) -> bool:
        """Return whether no search is needed for the forced tokens after the first `n_history` tokens of `history`.

        After the last known one, a search is needed if the bound or a draw has ended the last search.
        """
        place = self._place(history, n_prompt, n_history) if self._is_forced else None
        return place is not None and (place < len(self._path) or self._sets[place].only() is None)

    def _place(self, history: Sequence[int], n_prompt: int, n_history: int) -> int | None:
        """Return how many tokens of the path are the last ones of the first `n_history` tokens of `history`.

        None: the path does not lead there, or was not searched so far.
        """
        start = n_prompt + self._start
        place = n_history - start
        is_on_path = 0 <= place < len(self._sets) and list(history[start:n_history]) == list(self._path[:place])
        return place if is_on_path else None

    def __repr__(self) -> str:
        return f"<LookAhead {len(self._sets)} sets from token {self._start}>"
