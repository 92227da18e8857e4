"""Which lexemes of a grammar may follow each other: the FIRST and FOLLOW sets of compiler construction.

Source: Aho, Sethi and Ullman, Compilers: Principles, Techniques and Tools (1986), section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from llamaq.worker.generation.grammar.gbnf_reader import (
    Alternatives,
    CharacterClass,
    Group,
    Literal,
    Reference,
    Symbol,
    TokenSet,
)

SYMBOL_STEPS = 10
"""Number of steps for which a pass over a symbol counts."""

Lexeme: TypeAlias = Literal | CharacterClass | TokenSet | Reference
"""What is matched as a whole: a text, a character, a token, or a terminal."""


LexemeSet: TypeAlias = int
"""A set of lexemes, as the bits of an integer."""


class _First(NamedTuple):
    """How the texts of a symbol begin."""

    lexemes: LexemeSet
    has_empty: bool
    """Whether the empty text is one of them."""


_NOTHING = _First(0, has_empty=False)
_EMPTY = _First(0, has_empty=True)


class LexemeNeighbours:
    """The lexemes with which outputs begin, and those that may follow each lexeme.

    Args:
        rules: The rules of the grammar.
        root: The name of the first rule. It is not a terminal.
        terminals: The names of the rules that are terminals.
        divided: The literals that are divided into characters.
        has_empty: Returns whether the empty text is one of the texts of a lexeme.
        count_steps: Called with a number of steps before they are made. May raise an exception.

    Attributes:
        first: The lexemes with which outputs begin.
    """

    def __init__(
        self,
        rules: Mapping[str, Alternatives],
        root: str,
        terminals: Collection[str],
        divided: Collection[str],
        *,
        has_empty: Callable[[Lexeme], bool],
        count_steps: Callable[[int], None],
    ) -> None:
        self._terminals = terminals
        self._divided = divided
        self._has_empty = has_empty
        self._lexemes: list[Lexeme] = []
        self._index: dict[Lexeme, int] = {}
        self._following: list[LexemeSet] = []
        self._first = {name: _NOTHING for name in rules if name not in terminals}
        self._after = dict.fromkeys(self._first, 0)
        """For each rule, the lexemes that may follow it."""
        n_steps = {name: SYMBOL_STEPS * (1 + _n_symbols(rules[name])) for name in self._first}
        is_stable = False
        while not is_stable:
            before = dict(self._first)
            for name in reversed(self._first):  # rules are mostly defined after the rules that refer to them
                count_steps(n_steps[name])
                self._first[name] = self._first_of(rules[name])
            is_stable = before == self._first
        self.first = self._first[root].lexemes
        is_stable = False
        while not is_stable:
            before_pass = (*self._after.values(), *self._following)
            for name, after in self._after.items():
                count_steps(n_steps[name])
                self._add_following(rules[name], after)
            is_stable = before_pass == (*self._after.values(), *self._following)

    def following(self, lexeme: Lexeme) -> LexemeSet:
        """Return the lexemes that may follow a lexeme."""
        return self._following[self._index[lexeme]]

    def members(self, lexemes: LexemeSet) -> Iterator[Lexeme]:
        """Yield the lexemes of a set."""
        while lexemes:
            lowest = lexemes & -lexemes
            yield self._lexemes[lowest.bit_length() - 1]
            lexemes ^= lowest

    def _bit(self, lexeme: Lexeme) -> LexemeSet:
        if lexeme not in self._index:
            self._index[lexeme] = len(self._lexemes)
            self._lexemes.append(lexeme)
            self._following.append(0)
        return 1 << self._index[lexeme]

    def _first_of(self, alternatives: Alternatives) -> _First:
        parts = [self._first_of_sequence(symbols) for symbols in alternatives]
        lexemes = 0
        for part in parts:
            lexemes |= part.lexemes
        return _First(lexemes, any(part.has_empty for part in parts))

    def _first_of_sequence(self, symbols: Iterable[Symbol]) -> _First:
        lexemes = 0
        for symbol in symbols:
            first = self._first_of_symbol(symbol)
            lexemes |= first.lexemes
            if not first.has_empty:
                return _First(lexemes, has_empty=False)
        return _First(lexemes, has_empty=True)

    def _first_of_symbol(self, symbol: Symbol) -> _First:
        match symbol:
            case Literal(""):
                return _EMPTY
            case Literal(text) if text in self._divided:
                return _First(self._bit(Literal(text[0])), has_empty=False)
            case Reference(name) if name not in self._terminals:
                return self._first[name]
            case Group(alternatives, least):
                first = self._first_of(alternatives)
                return first if least else first._replace(has_empty=True)
            case _:
                return _First(self._bit(symbol), self._has_empty(symbol))

    def _add_following(self, alternatives: Alternatives, after: LexemeSet) -> None:
        """Record what follows the lexemes and the rules of a rule or a group, which `after` follows."""
        for symbols in alternatives:
            follows = after
            for symbol in reversed(symbols):
                self._add_after(symbol, follows)
                first = self._first_of_symbol(symbol)
                follows = first.lexemes | (follows if first.has_empty else 0)

    def _add_after(self, symbol: Symbol, after: LexemeSet) -> None:
        match symbol:
            case Literal(""):
                return
            case Literal(text) if text in self._divided:
                for character, following in pairwise(text):
                    self._add(Literal(character), self._bit(Literal(following)))
                self._add(Literal(text[-1]), after)
            case Reference(name) if name not in self._terminals:
                self._after[name] |= after
            case Group(alternatives, _, most):
                repeated = 0 if most == 1 else self._first_of(alternatives).lexemes
                self._add_following(alternatives, after | repeated)
            case _:
                self._add(symbol, after)

    def _add(self, lexeme: Lexeme, following: LexemeSet) -> None:
        self._bit(lexeme)
        self._following[self._index[lexeme]] |= following

    def __repr__(self) -> str:
        return f"<LexemeNeighbours {len(self._lexemes)} lexemes>"


def _n_symbols(alternatives: Alternatives) -> int:
    return sum(
        1 + (_n_symbols(symbol.alternatives) if isinstance(symbol, Group) else 0)
        for symbols in alternatives
        for symbol in symbols
    )
