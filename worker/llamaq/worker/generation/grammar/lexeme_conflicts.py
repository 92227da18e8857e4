r"""Finds the parts of a grammar that must not be matched with the longest possible text.

Outside of terminals, a grammar is a sequence of lexemes: terminals, literals, character classes and tokens. llguidance
reads the longest text that any lexeme allows at this place, and only then decides which lexemes it was. So where a
lexeme could end, but another lexeme or the same one could also match the next character, llguidance never lets the
first one end. This loses outputs if the next character could also begin what follows the first one: a conflict. With
`num ::= [0-9]+ ws` and `ws ::= [ \t\n]*`, there is one in `num "\n"`, because `num` takes the line feed.

The lexeme that could match the next character is divided into its parts. Where each lexeme has one character, there is
no conflict. A lexeme that is divided without need takes longer to match, but its texts are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import NamedTuple

from llamaq.worker.generation.grammar.gbnf_reader import (
    MAX_CODE_POINT,
    Alternatives,
    Literal,
    Range,
    Reference,
    TokenSet,
)
from llamaq.worker.generation.grammar.lexeme_automaton import Automaton, States, TooManyStates
from llamaq.worker.generation.grammar.lexeme_neighbours import Lexeme, LexemeNeighbours

MAX_STEPS = 3_000_000
"""Upper bound on the steps of the search, which take about a second. In a grammar that needs more steps, lexemes that
have not been compared keep the longest text."""
ALL: Range = (0, MAX_CODE_POINT)


class _OutOfSteps(Exception):
    """The comparison of all lexemes would take too many steps."""


class _Comparison(NamedTuple):
    """What two lexemes have in common."""

    have_common_text: bool
    """Whether both lexemes have a text in common."""
    have_conflict: bool
    """Whether a text of the first lexeme can be followed by a character that also continues the second one."""


class LexemeConflicts:
    """Divides the lexemes of a grammar until there is no conflict.

    Args:
        rules: The rules of the grammar.
        root: The name of the first rule.
        terminals: The names of the rules that may be terminals.

    Attributes:
        terminals: The names of the rules that can be terminals without a conflict.
        divided: The literals that must be divided into characters outside of terminals.
        is_exact: Whether all lexemes were compared. If not, some match the longest text although it may be wrong.
    """

    def __init__(self, rules: Mapping[str, Alternatives], root: str, terminals: Collection[str]) -> None:
        self._rules = rules
        self._root = root
        self.terminals = set(terminals)
        self.divided: set[str] = set()
        self.is_exact = True
        self._n_left = MAX_STEPS
        self._automaton = cache(self._make_automaton)
        if root in self.terminals:
            return  # the only lexeme is the whole output
        try:
            while too_long := self._too_long():
                for lexeme in too_long:
                    self._divide(lexeme)
        except _OutOfSteps:
            self.is_exact = False

    def _divide(self, lexeme: Lexeme) -> None:
        """Divide a lexeme into its parts."""
        if isinstance(lexeme, Reference):
            self.terminals.discard(lexeme.name)
        elif isinstance(lexeme, Literal):
            self.divided.add(lexeme.text)

    def _too_long(self) -> set[Lexeme]:
        """Return the lexemes that have a conflict with a lexeme that could end earlier.

        Two lexemes are compared if both are allowed after the same text. This is so at the beginning, and after two
        lexemes that have a text in common.
        """
        neighbours = LexemeNeighbours(
            self._rules,
            self._root,
            self.terminals,
            self.divided,
            has_empty=self._has_empty,
            count_steps=self._count_steps,
        )
        following = cache(neighbours.following)
        next_ranges = cache(lambda lexeme: self._next_ranges(following(lexeme)))
        too_long: set[Lexeme] = set()
        seen: set[tuple[Lexeme, Lexeme]] = set()
        waiting = self._pairs(neighbours.first, neighbours.first)
        while waiting:
            pair = waiting.pop()
            if pair in seen:
                continue
            seen.add(pair)
            one, other = pair
            have_common_text, have_conflict = self._compare(one, other, next_ranges(one))
            if have_conflict:
                too_long.add(other)
            if have_common_text:
                waiting += self._pairs(following(one), following(other))
        return too_long

    def _pairs(self, lexemes: Collection[Lexeme], others: Collection[Lexeme]) -> list[tuple[Lexeme, Lexeme]]:
        self._count_steps(len(lexemes) * len(others))
        return list(product(lexemes, others))

    def _compare(self, one: Lexeme, other: Lexeme, next_ranges: Collection[Range]) -> _Comparison:
        """Compare two lexemes. Characters of `next_ranges` may follow `one`."""
        ending, continuing = self._automaton(one), self._automaton(other)
        if ending is None or continuing is None:
            return _Comparison(have_common_text=True, have_conflict=False)
        have_common_text = False
        waiting: list[tuple[States, States]] = [(ending.first, continuing.first)]
        seen: set[tuple[States, States]] = set()
        while waiting:
            firsts = waiting.pop()
            self._count_steps((ending.n_ranges(firsts[0]) + continuing.n_ranges(firsts[1])) ** 2)
            for states in set(_matching_alike(ending, continuing, *firsts)) - seen:
                seen.add(states)
                continued = continuing.next_states(states[1])
                if states[0] & ending.last:
                    have_common_text |= bool(states[1] & continuing.last)
                    self._count_steps(continuing.n_ranges(continued) * len(next_ranges))
                    if _overlap(continuing.ranges(continued), next_ranges):
                        return _Comparison(have_common_text=True, have_conflict=True)
                waiting.append((ending.next_states(states[0]), continued))
        return _Comparison(have_common_text, have_conflict=False)

    def _next_ranges(self, lexemes: Collection[Lexeme]) -> set[Range]:
        """Return the ranges of the first characters of these lexemes."""
        self._count_steps(len(lexemes))
        return {ranges for lexeme in lexemes for ranges in self._first_ranges(lexeme)}

    def _first_ranges(self, lexeme: Lexeme) -> Iterable[Range]:
        """Return the ranges of the first characters of a lexeme. The text of a negated token can be any."""
        if isinstance(lexeme, TokenSet):
            return [ALL] if lexeme.is_negated else []
        automaton = self._automaton(lexeme)
        return [ALL] if automaton is None else automaton.ranges(automaton.first)

    def _has_empty(self, lexeme: Lexeme) -> bool:
        automaton = self._automaton(lexeme)
        return automaton is not None and automaton.has_empty

    def _make_automaton(self, lexeme: Lexeme) -> Automaton | None:
        """Return the automaton of a lexeme. None: it is a token, or too large or deep."""
        if isinstance(lexeme, TokenSet):
            return None
        try:
            return Automaton(lexeme, self._rules)
        except (TooManyStates, RecursionError):
            self.is_exact = False
            return None

    def _count_steps(self, n_steps: int) -> None:
        self._n_left -= n_steps
        if self._n_left < 0:
            raise _OutOfSteps

    def __repr__(self) -> str:
        return f"<LexemeConflicts {len(self.terminals)} terminals, {len(self.divided)} divided literals>"


def _matching_alike(
    one: Automaton, other: Automaton, states: States, others: States
) -> Iterator[tuple[States, States]]:
    """Yield the states that match a character, for each kind of character that states of both automata match."""
    borders = {low for low, _ in (*one.ranges(states), *other.ranges(others))}
    borders |= {high + 1 for _, high in (*one.ranges(states), *other.ranges(others))}
    for character in borders:
        matching = one.matching(states, character)
        others_matching = other.matching(others, character) if matching else matching
        if others_matching:
            yield matching, others_matching


def _overlap(ranges: Iterable[Range], others: Collection[Range]) -> bool:
    return any(low <= other_high and other_low <= high for low, high in ranges for other_low, other_high in others)
