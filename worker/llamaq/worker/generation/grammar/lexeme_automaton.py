"""The texts of a regular rule, as a nondeterministic automaton of Glushkov's construction.

Each state except the first one is a place in the rule where a character is matched. No state is entered without a
character, so the characters that may come next are those of the states that may come next.

Source: Glushkov, The abstract theory of automata, Russian Mathematical Surveys 16 (1961).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import reduce
from typing import NamedTuple, TypeAlias

from llamaq.worker.generation.grammar.gbnf_reader import (
    Alternatives,
    CharacterClass,
    Group,
    Literal,
    Range,
    Reference,
    Symbol,
)

MAX_STATES = 100_000
"""Upper bound on the states of an automaton, and on its pairs of states that follow each other."""
MAX_COPIES = 8
"""A symbol that is repeated more often counts as repeated any number of times, so that automata stay small. Then an
automaton has more texts than its rule."""

States: TypeAlias = frozenset[int]
NO_STATES: States = frozenset()
STATE_STEPS = 15
"""Number of steps for which a state counts, and also a symbol."""


class TooManyStates(Exception):
    """The automaton of a rule would have more than `MAX_STATES` states, or pairs of states that follow each other."""


class _Part(NamedTuple):
    """A part of the automaton: the states of its first and its last characters."""

    first: States
    last: States
    has_empty: bool
    """Whether the empty text is one of its texts."""


_EMPTY = _Part(NO_STATES, NO_STATES, has_empty=True)


class Automaton:
    """The automaton of a symbol.

    Args:
        symbol: The symbol.
        rules: The rules that it may refer to, directly and through other rules. None of them reaches itself.
        count_steps: Called with a number of steps before they are made. May raise an exception.

    Attributes:
        first: The states of the first characters.
        last: The states of the last characters.
        has_empty: Whether the empty text is one of the texts.

    Raises:
        TooManyStates: The automaton is too large.
    """

    def __init__(
        self, symbol: Symbol, rules: Mapping[str, Alternatives], count_steps: Callable[[int], None] = lambda _: None
    ) -> None:
        self._rules = rules
        self._count_steps = count_steps
        self._n_pairs = 0
        self._ranges: list[tuple[Range, ...]] = []
        self._next: list[set[int]] = []
        self.first, self.last, self.has_empty = self._symbol(symbol)
        self._next_states = list(map(frozenset, self._next))

    def next_states(self, states: States) -> States:
        """Return the states of the characters that may follow."""
        if len(states) == 1:
            (state,) = states
            return self._next_states[state]
        return NO_STATES.union(*[self._next_states[state] for state in states])

    def ranges(self, states: States) -> Collection[Range]:
        """Return the ranges of the characters of these states, each range once."""
        if len(states) == 1:
            (state,) = states
            return self._ranges[state]
        return {one for state in states for one in self._ranges[state]}

    def n_ranges(self, states: States) -> int:
        """Return the number of ranges of these states. A range counts once for each state that has it."""
        return sum([len(self._ranges[state]) for state in states])

    def by_range(self, states: States) -> dict[Range, list[int]]:
        """Return the ranges of the characters of these states, and for each range the states that have it."""
        found: dict[Range, list[int]] = {}
        for state in states:
            for one in self._ranges[state]:
                found.setdefault(one, []).append(state)
        return found

    def _symbol(self, symbol: Symbol) -> _Part:
        self._count_steps(STATE_STEPS)
        match symbol:
            case Literal(text):
                return self._texts([text])
            case CharacterClass(ranges):
                return self._character(ranges)
            case Reference(name):
                return self._alternatives(self._rules[name])
            case Group(alternatives, least, most):
                return self._repetition(alternatives, least, most)
        raise TypeError(f"{symbol!r} is not part of a regular rule")

    def _character(self, ranges: tuple[Range, ...]) -> _Part:
        state = frozenset({self._add_state(_merged(ranges))})
        return _Part(state, state, has_empty=False)

    def _add_state(self, ranges: tuple[Range, ...]) -> int:
        state = len(self._ranges)
        if state == MAX_STATES:
            raise TooManyStates
        self._count_steps(STATE_STEPS)
        self._ranges.append(ranges)
        self._next.append(set())
        return state

    def _texts(self, texts: list[str]) -> _Part:
        """Return texts, any of which may be matched. Their states are a trie: texts share those of a common beginning.

        Otherwise a rule of a thousand words would have hundreds of states that match the same character.
        """
        first: set[int] = set()
        last: set[int] = set()
        children: dict[tuple[int | None, str], int] = {}
        for text in texts:
            state: int | None = None
            for character in text:
                before, state = state, children.get((state, character))
                if state is None:
                    state = children[before, character] = self._add_state(((ord(character), ord(character)),))
                    (first if before is None else self._next[before]).add(state)
            if state is not None:
                last.add(state)
        return _Part(frozenset(first), frozenset(last), has_empty="" in texts)

    def _alternatives(self, alternatives: Alternatives) -> _Part:
        texts: list[str] = []
        parts: list[_Part] = []
        for symbols in alternatives:
            match symbols:
                case [Literal(text)]:
                    texts.append(text)
                case _:
                    parts.append(self._sequence(self._symbol(one) for one in symbols))
        if texts:
            parts.append(self._texts(texts))
        first = NO_STATES.union(*[part.first for part in parts])
        last = NO_STATES.union(*[part.last for part in parts])
        return _Part(first, last, any(part.has_empty for part in parts))

    def _sequence(self, parts: Iterable[_Part]) -> _Part:
        return reduce(self._after, parts, _EMPTY)

    def _after(self, part: _Part, other: _Part) -> _Part:
        """Return the texts of one part, followed by those of another."""
        self._follow(part.last, other.first)
        first = part.first | other.first if part.has_empty else part.first
        last = part.last | other.last if other.has_empty else other.last
        return _Part(first, last, part.has_empty and other.has_empty)

    def _repetition(self, alternatives: Alternatives, least: int, most: int | None) -> _Part:
        if most is None or most > MAX_COPIES:
            least, most = min(least, MAX_COPIES), None
        required = [self._alternatives(alternatives) for _ in range(least)]
        if most is None:
            return self._sequence([*required, self._loop(self._alternatives(alternatives))])
        optional = [self._alternatives(alternatives)._replace(has_empty=True) for _ in range(most - least)]
        return self._sequence([*required, *optional])

    def _loop(self, part: _Part) -> _Part:
        """Return the part, repeated any number of times."""
        self._follow(part.last, part.first)
        return part._replace(has_empty=True)

    def _follow(self, states: States, others: States) -> None:
        """Let each of the other states follow each state."""
        n_pairs = len(states) * len(others)
        self._n_pairs += n_pairs
        if self._n_pairs > MAX_STATES:
            raise TooManyStates
        self._count_steps(n_pairs)
        for state in states:
            self._next[state] |= others

    def __repr__(self) -> str:
        return f"<Automaton {len(self._ranges)} states>"


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges of the same characters that do not overlap."""
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)
