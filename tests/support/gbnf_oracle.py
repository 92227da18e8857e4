"""Decides slowly and simply which texts a grammar in GBNF has, and makes random grammars."""

from __future__ import annotations

from random import Random

from llamaq.worker.generation.grammar.gbnf_reader import (
    Alternatives,
    CharacterClass,
    Group,
    Literal,
    Reference,
    Symbol,
    read_gbnf,
)

NAMES = ("root", "a", "b", "c")
LITERALS = ("a", "b", "ab", "ba", "aab", "bb")
REPETITIONS = (*[""] * 12, "*", "+", "?")
CLASSES = ("[ab]", "[a]", "[^a]", "[b-c]")


class TextsOf:
    """The texts of a grammar. It has no tokens.

    `text in TextsOf(gbnf)` finds all parts of the text that each rule matches, again and again until there are no more.
    """

    def __init__(self, gbnf: str) -> None:
        self._rules = read_gbnf(gbnf)
        self._text = ""
        self._parts: dict[str, set[tuple[int, int]]] = {}
        """Maps each rule to the parts of the text that it matches, by their start and end."""

    def __contains__(self, text: str) -> bool:
        self._text = text
        self._parts = {name: set() for name in self._rules}
        has_grown = True
        while has_grown:
            n_before = sum(map(len, self._parts.values()))
            for name, body in self._rules.items():
                for start in range(len(text) + 1):
                    self._parts[name] |= {(start, end) for end in self._ends(body, start)}
            has_grown = sum(map(len, self._parts.values())) > n_before
        return (0, len(text)) in self._parts["root"]

    def _ends(self, alternatives: Alternatives, start: int) -> set[int]:
        """Return where the matches end that begin at `start`."""
        found: set[int] = set()
        for symbols in alternatives:
            ends = {start}
            for symbol in symbols:
                ends = {end for place in ends for end in self._ends_of_symbol(symbol, place)}
            found |= ends
        return found

    def _ends_of_symbol(self, symbol: Symbol, start: int) -> set[int]:
        match symbol:
            case Literal(text):
                return {start + len(text)} if self._text.startswith(text, start) else set()
            case CharacterClass(ranges):
                character = self._text[start : start + 1]
                return (
                    {start + 1} if character and any(low <= ord(character) <= high for low, high in ranges) else set()
                )
            case Reference(name):
                return {end for begin, end in self._parts[name] if begin == start}
            case Group(alternatives, least, most):
                # More repetitions than characters add nothing but the empty text.
                most = least + len(self._text) + 1 if most is None else most
                found, ends = set[int](), {start}
                for n_repetitions in range(most + 1):
                    found |= ends if n_repetitions >= least else set()
                    ends = {end for place in ends for end in self._ends(alternatives, place)}
                return found
            case _:
                raise TypeError(symbol)


def random_gbnf(random: Random) -> str:
    """Return a grammar of a few rules, which may refer to each other."""
    return "\n".join(f"{name} ::= {_alternatives(random, 0)}" for name in NAMES)


def _alternatives(random: Random, depth: int) -> str:
    return " | ".join(_sequence(random, depth) for _ in range(random.choice((1, 1, 2))))


def _sequence(random: Random, depth: int) -> str:
    return " ".join(
        _symbol(random, depth) + random.choice(" " * 12 + "*+?") for _ in range(random.choice((1, 1, 2, 2, 3)))
    )


def _symbol(random: Random, depth: int) -> str:
    kind = random.random()
    if kind < 0.35:
        return f'"{random.choice(LITERALS)}"'
    if kind < 0.5:
        return random.choice(CLASSES)
    if kind < 0.75 or depth == 2:
        return random.choice(NAMES)
    return f"({_alternatives(random, depth + 1)}){random.choice(('', '*', '+', '?', '{2}', '{1,3}'))}"
