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

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
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
from llamaq.worker.generation.grammar.lexeme_neighbours import Lexeme, LexemeNeighbours, LexemeSet

MAX_STEPS = 6_000_000
"""Upper bound on the steps of the search, which take two to three seconds. In a grammar that needs more steps, lexemes
that have not been compared keep the longest text."""
MAX_COMPARISON_STEPS = MAX_STEPS // 2
"""Upper bound on the steps of the comparison of two lexemes. If it takes more, the others are still compared."""
STATES_IN_STEP = 8
"""A step makes a set with this number of states."""
PAIR_STEPS = 10
"""Number of steps for which a pair of lexemes or of sets of states counts. The comparison of two ranges is one step."""
ALL: Range = (0, MAX_CODE_POINT)


class _OutOfSteps(Exception):
    """The comparison of all lexemes would take too many steps."""


class _Comparison(NamedTuple):
    """What two lexemes have in common."""

    have_common_text: bool
    """Whether both lexemes have a text in common."""
    have_conflict: bool
    """Whether a text of the first lexeme can be followed by a character that also continues the second one."""


class _Candidates(NamedTuple):
    """The lexemes that may come next."""

    texts: list[str]
    """The texts of the literals, in ascending order."""
    others: list[Lexeme]

    def all(self) -> Iterator[Lexeme]:
        """Yield the lexemes."""
        yield from map(Literal, self.texts)
        yield from self.others

    def continuing(self, text: str) -> Iterator[Lexeme]:
        """Yield the literals that begin with a text, and all other lexemes."""
        for place in range(bisect_left(self.texts, text), len(self.texts)):
            if not self.texts[place].startswith(text):
                break
            yield Literal(self.texts[place])
        yield from self.others


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
        self._comparison = cache(self._compare)  # most comparisons are the same again when other lexemes are divided
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
        # Many lexemes are followed by the same ones, so the results for a set of lexemes are kept.
        candidates = cache(lambda lexemes: self._candidates(neighbours.members(lexemes)))
        next_ranges = cache(lambda lexemes: self._next_ranges(candidates(lexemes).all()))
        too_long: set[Lexeme] = set()
        seen: set[tuple[Lexeme, Lexeme]] = set()
        seen_sets: set[tuple[LexemeSet, LexemeSet]] = set()
        waiting = [(neighbours.first, neighbours.first)]
        while waiting:
            sets = waiting.pop()
            if sets in seen_sets:
                continue
            seen_sets.add(sets)
            for pair in self._pairs(candidates(sets[0]), candidates(sets[1])):
                if pair in seen:
                    continue
                seen.add(pair)
                one, other = pair
                have_common_text, have_conflict = self._comparison(one, other, next_ranges(following(one)))
                if have_conflict:
                    too_long.add(other)
                if have_common_text:
                    waiting.append((following(one), following(other)))
        return too_long

    def _candidates(self, lexemes: Iterable[Lexeme]) -> _Candidates:
        members = list(lexemes)
        self._count_steps(PAIR_STEPS * len(members))
        texts = sorted(lexeme.text for lexeme in members if isinstance(lexeme, Literal))
        return _Candidates(texts, [lexeme for lexeme in members if not isinstance(lexeme, Literal)])

    def _pairs(self, candidates: _Candidates, others: _Candidates) -> Iterator[tuple[Lexeme, Lexeme]]:
        """Yield the pairs that may have a common text or a conflict."""
        for one in candidates.all():
            self._count_steps(PAIR_STEPS)
            for other in others.continuing(one.text) if isinstance(one, Literal) else others.all():
                self._count_steps(PAIR_STEPS)
                yield one, other

    def _compare(self, one: Lexeme, other: Lexeme, next_ranges: Collection[Range]) -> _Comparison:
        """Compare two lexemes. Characters of `next_ranges` may follow `one`."""
        if isinstance(one, Literal) and isinstance(other, Literal):
            next_character = _ranges_of(other.text[len(one.text) :]) if other.text.startswith(one.text) else []
            return _Comparison(one == other, have_conflict=_overlap(next_character, next_ranges))
        ending, continuing = self._automaton(one), self._automaton(other)
        if ending is None or continuing is None:
            return _Comparison(have_common_text=True, have_conflict=False)
        n_left_after = self._n_left - MAX_COMPARISON_STEPS
        have_common_text = False
        waiting: list[tuple[States, States]] = [(ending.first, continuing.first)]
        seen: set[tuple[States, States]] = set()
        while waiting:
            for states in self._matching_alike(ending, continuing, *waiting.pop()):
                if states in seen:
                    continue
                seen.add(states)
                continued = continuing.next_states(states[1])
                if states[0] & ending.last:
                    have_common_text |= bool(states[1] & continuing.last)
                    self._count_steps(continuing.n_ranges(continued))
                    ranges = continuing.ranges(continued)
                    self._count_steps(len(ranges) * len(next_ranges))
                    if _overlap(ranges, next_ranges):
                        return _Comparison(have_common_text=True, have_conflict=True)
                waiting.append((ending.next_states(states[0]), continued))
            if self._n_left < n_left_after:
                self.is_exact = False
                return _Comparison(have_common_text=True, have_conflict=False)
        return _Comparison(have_common_text, have_conflict=False)

    def _matching_alike(
        self, one: Automaton, other: Automaton, states: States, others: States
    ) -> Iterator[tuple[States, States]]:
        """Yield the states that match a character, for each kind of character that states of both automata match."""
        if len(states) == len(others) == 1:
            self._count_steps(PAIR_STEPS)
            if _overlap(one.ranges(states), other.ranges(others)):
                yield states, others
            return
        self._count_steps(PAIR_STEPS + one.n_ranges(states) + other.n_ranges(others))
        ranges = one.by_range(states)
        other_ranges = ranges if one is other and states == others else other.by_range(others)
        borders = {border for low, high in (*ranges, *other_ranges) for border in (low, high + 1)}
        self._count_steps(len(borders) * (len(ranges) + len(other_ranges)))
        for character in borders:
            matching = _matching(ranges, character)
            others_matching = matching if other_ranges is ranges else _matching(other_ranges, character)
            self._count_steps((len(matching) + len(others_matching)) // STATES_IN_STEP)
            if matching and others_matching:
                yield matching, others_matching

    def _next_ranges(self, lexemes: Iterable[Lexeme]) -> frozenset[Range]:
        """Return the ranges of the first characters of these lexemes."""
        return frozenset(ranges for lexeme in lexemes for ranges in self._first_ranges(lexeme))

    def _first_ranges(self, lexeme: Lexeme) -> Iterable[Range]:
        """Return the ranges of the first characters of a lexeme. The text of a negated token can be any."""
        match lexeme:
            case Literal(text):
                return _ranges_of(text)
            case TokenSet(_, is_negated):
                return [ALL] if is_negated else []
        automaton = self._automaton(lexeme)
        return [ALL] if automaton is None else automaton.ranges(automaton.first)

    def _has_empty(self, lexeme: Lexeme) -> bool:
        if not isinstance(lexeme, Reference):
            return False
        automaton = self._automaton(lexeme)
        return automaton is not None and automaton.has_empty

    def _make_automaton(self, lexeme: Lexeme) -> Automaton | None:
        """Return the automaton of a lexeme. None: it is a token, or too large or deep."""
        if isinstance(lexeme, TokenSet):
            return None
        try:
            return Automaton(lexeme, self._rules, self._count_steps)
        except (TooManyStates, RecursionError):
            self.is_exact = False
            return None

    def _count_steps(self, n_steps: int) -> None:
        self._n_left -= n_steps
        if self._n_left < 0:
            raise _OutOfSteps

    def __repr__(self) -> str:
        return f"<LexemeConflicts {len(self.terminals)} terminals, {len(self.divided)} divided literals>"


def _ranges_of(text: str) -> list[Range]:
    """Return the range of the first character of a text. There is none if the text is empty."""
    return [(ord(one), ord(one)) for one in text[:1]]


def _matching(ranges: Mapping[Range, Iterable[int]], character: int) -> States:
    """Return the states of those ranges that contain a character, given as a code point."""
    return frozenset(
        chain.from_iterable([states for (low, high), states in ranges.items() if low <= character <= high])
    )


def _overlap(ranges: Iterable[Range], others: Collection[Range]) -> bool:
    for low, high in ranges:
        for other_low, other_high in others:
            if low <= other_high and other_low <= high:
                return True
    return False
