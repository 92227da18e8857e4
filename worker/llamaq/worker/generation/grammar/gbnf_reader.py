"""Reads a grammar in GBNF, the language of llama.cpp, which grammars/README.md of llama.cpp describes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from llamaq.common.errors import ErrorCode, JobRejected

MAX_NESTING = 64
"""Upper bound on the levels of groups in a grammar."""
MAX_CODE_POINT = 0x10FFFF

_SYMBOL = re.compile(
    r"""(?P<space> \s+ | \#[^\r\n]* )
      | "(?P<literal> (?:\\.|[^"\\])* )"
      | \[(?P<negated> \^? )(?P<class> (?:\\.|[^\]\\])* )\]
      | (?P<token> !?<[^>]+> )
      | (?P<rule> [A-Za-z0-9\-]+ )[\ \t]*::=
      | (?P<name> [A-Za-z0-9\-]+ )
      | (?P<repeat> [*+?] | \{\s*\d+\s*(?:,\s*\d*\s*)?\} )
      | (?P<punctuation> [.|()] )""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"""\\x(?P<x>[0-9a-fA-F]{2}) | \\u(?P<u>[0-9a-fA-F]{4}) | \\U(?P<U>[0-9a-fA-F]{8})
      | \\(?P<escape>[tnr"\\\[\]\-]) | (?P<bad>\\) | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_TOO_MANY = re.compile(r"\d{10}")
_TOKEN_ID = re.compile(r"<\[(\d+)\]>")
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r"}

Range: TypeAlias = tuple[int, int]
"""The first and the last code point of adjacent characters."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A text, which may be empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """One character of these ranges."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class TokenSet:
    """One of these tokens, or one of all tokens but these."""

    tokens: tuple[int, ...]
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """A text of another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Group:
    """A text of one of the alternatives, repeated."""

    alternatives: Alternatives
    least: int = 1
    most: int | None = 1
    """Largest number of repetitions. None: there is no limit."""


Symbol: TypeAlias = Literal | CharacterClass | TokenSet | Reference | Group
Alternatives: TypeAlias = list[list[Symbol]]
"""The alternatives of a rule or a group; each is a sequence of symbols."""
EMPTY = Literal("")


def read_gbnf(
    text: str, end_tokens: Collection[int] = (), token_of: Callable[[str], int | None] = lambda _: None
) -> dict[str, Alternatives]:
    """Return the rules of a grammar by their names.

    Args:
        text: The grammar.
        end_tokens: The tokens that end a generation. No negated token such as `!<[5]>` matches them, because an output
            would end in the middle of its grammar.
        token_of: Returns the token with a text such as `<think>`. None: no single token has this text.

    Raises:
        JobRejected: The grammar has a syntax error, or refers to a token that does not exist.
    """
    return _Reader(text, end_tokens, token_of).read()


def rejected(reason: str) -> JobRejected:
    """Return the error for a grammar."""
    return JobRejected(ErrorCode.INVALID_GRAMMAR, f"the grammar cannot be used: {reason}")


class _Reader:
    """Reads the rules of a grammar."""

    def __init__(self, text: str, end_tokens: Collection[int], token_of: Callable[[str], int | None]) -> None:
        self._text = text
        self._end_tokens = end_tokens
        self._token_of = token_of
        self._position = 0
        self._rules: dict[str, Alternatives] = {}
        self._open: list[Alternatives] = []
        """For each group that is not closed yet: the alternatives that contain the group."""
        self._current: Alternatives | None = None

    def read(self) -> dict[str, Alternatives]:
        while self._position < len(self._text):
            match = _SYMBOL.match(self._text, self._position)
            if match is None:
                raise self._error("a syntax error")
            self._read_symbol(match)
            self._position = match.end()
        if self._open:
            raise self._error("a group that is not closed")
        return self._rules

    def _read_symbol(self, match: re.Match[str]) -> None:
        symbol = match.group()
        match match.lastgroup:
            case "rule":
                self._begin_rule(match["rule"])
            case "name":
                self._add(Reference(symbol))
            case "literal":
                self._add(Literal("".join(map(chr, self._code_points(match["literal"])))))
            case "class":
                self._add(self._character_class(match["class"], negated=bool(match["negated"])))
            case "token":
                self._add(self._token(symbol))
            case "repeat":
                self._repeat(re.sub(r"\s", "", symbol))
            case "punctuation":
                self._read_punctuation(symbol)

    def _begin_rule(self, name: str) -> None:
        if self._open:
            raise self._error("a group that is not closed")
        if name in self._rules:
            raise self._error(f"a second rule {name!r}")
        self._current = self._rules[name] = [[]]

    def _add(self, symbol: Symbol) -> None:
        self._alternatives()[-1].append(symbol)

    def _alternatives(self) -> Alternatives:
        if self._current is None:
            raise self._error("a symbol before the first rule (NAME ::= ...)")
        return self._current

    def _repeat(self, repeat: str) -> None:
        symbols = self._alternatives()[-1]
        if not symbols:
            raise self._error("a repetition of nothing")
        if _TOO_MANY.search(repeat):
            raise self._error("a repetition of too many times")
        least, most = _bounds(repeat)
        # In `a*{2}`, the second repetition applies to `a*` as a whole.
        symbols[-1] = EMPTY if most == 0 else Group([[symbols[-1]]], least, most)

    def _read_punctuation(self, symbol: str) -> None:
        alternatives = self._alternatives()
        if symbol == "|":
            alternatives.append([])
        elif symbol == ".":
            self._add(CharacterClass(((0, MAX_CODE_POINT),)))
        elif symbol == "(":
            group: Alternatives = [[]]
            self._add(Group(group))
            self._open.append(alternatives)
            self._current = group
            if len(self._open) > MAX_NESTING:
                raise rejected(f"its groups nest deeper than {MAX_NESTING} levels")
        elif self._open:
            self._current = self._open.pop()
        else:
            raise self._error("a group that is not opened")

    def _token(self, symbol: str) -> TokenSet:
        """Return a symbol such as `<[5]>` or `<think>`. `!<[5]>` is any token but this and the end tokens."""
        name = symbol.removeprefix("!")
        number = _TOKEN_ID.fullmatch(name)
        token = int(number[1]) if number else self._token_of(name)
        if token is None:
            raise self._error(f"{name}, which is not one token of this model's vocabulary,")
        if name == symbol:
            return TokenSet((token,))
        return TokenSet(tuple(sorted({token, *self._end_tokens})), is_negated=True)

    def _character_class(self, text: str, *, negated: bool) -> CharacterClass:
        """Return a character class such as `[a-z]`."""
        ranges: list[Range] = []
        points = list(_CHARACTER.finditer(text))
        place = 0
        while place < len(points):
            low = high = self._code_point(points[place])
            if place + 2 < len(points) and points[place + 1].group() == "-":
                high = self._code_point(points[place + 2])
                place += 2
            if low > high:
                raise self._error("a range of characters in descending order")
            ranges.append((low, high))
            place += 1
        if negated:
            ranges = list(_complement(ranges))
        if not ranges:
            raise self._error("a class that no character matches")
        return CharacterClass(tuple(ranges))

    def _code_points(self, text: str) -> Iterator[int]:
        return map(self._code_point, _CHARACTER.finditer(text))

    def _code_point(self, match: re.Match[str]) -> int:
        if match.lastgroup == "bad":
            raise self._error("an unknown escape sequence")
        if match.lastgroup == "plain":
            return ord(match.group())
        if match.lastgroup == "escape":
            return ord(_ESCAPES.get(match["escape"], match["escape"]))
        point = int(match[match.lastgroup or 0], 16)
        if point > MAX_CODE_POINT:
            raise self._error("an escape sequence that is not a character of Unicode")
        return point

    def _error(self, what: str) -> JobRejected:
        before = self._text[: self._position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return rejected(f"it has {what} at line {line}, column {column}")


def _bounds(repeat: str) -> tuple[int, int | None]:
    """Return the least and the largest number of repetitions of a symbol such as `*` or `{2,}`."""
    if repeat in "*+?":
        return int(repeat == "+"), 1 if repeat == "?" else None
    least, comma, most = repeat.strip("{}").partition(",")
    if not comma:
        return int(least), int(least)
    return int(least), int(most) if most else None


def _complement(ranges: list[Range]) -> Iterator[Range]:
    """Yield the ranges of code points that are in none of `ranges`."""
    start = 0
    for low, high in sorted(ranges):
        if low > start:
            yield start, low - 1
        start = max(start, high + 1)
    if start <= MAX_CODE_POINT:
        yield start, MAX_CODE_POINT
