"""Translates a grammar in GBNF, the language of llama.cpp, into a Lark grammar for llguidance.

GBNF is described in grammars/README.md of llama.cpp. A rule that cannot reach itself becomes a terminal of Lark, which
is one regular expression. If the root is such a rule, the Lark grammar accepts exactly the texts of the GBNF grammar.
Otherwise llguidance matches each terminal with the longest possible text, as the lexer of a programming language does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

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
_TOKEN_ID = re.compile(r"<\[(\d+)\]>")
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r"}


@dataclass(slots=True)
class _Item:
    """A symbol in a rule with its repetition: a fragment of Lark, the name of a rule, or a group."""

    lark: str = ""
    name: str | None = None
    group: list[list[_Item]] | None = None
    repeat: str = ""


_Alternatives = list[list[_Item]]


def gbnf_to_lark(
    text: str,
    root: str,
    end_tokens: Collection[int] = (),
    token_of: Callable[[str], int | None] = lambda _: None,
) -> str:
    """Return the grammar as Lark.

    Args:
        text: The grammar in GBNF.
        root: The name of the rule that the whole output must match.
        end_tokens: The tokens that end a generation. No negated token such as `!<[5]>` matches them, because an output
            would end in the middle of its grammar.
        token_of: Returns the token with a text such as `<think>`. None: no single token has this text.

    Raises:
        JobRejected: The grammar has a syntax error, or refers to a rule or a token that does not exist.
    """
    rules = _Reader(text, end_tokens, token_of).read()
    if not rules:
        raise _rejected("it has no rules")
    if root not in rules:
        raise _rejected(f"it has no rule {root!r}; `grammar_root` names the rule that it starts with")
    return _Writer(rules).write(root)


class _Reader:
    """Reads the rules of a grammar."""

    def __init__(self, text: str, end_tokens: Collection[int], token_of: Callable[[str], int | None]) -> None:
        self._text = text
        self._end_tokens = end_tokens
        self._token_of = token_of
        self._position = 0
        self._rules: dict[str, _Alternatives] = {}
        self._open: list[_Alternatives] = []
        """For each group that is not closed yet: the alternatives that contain the group."""
        self._current: _Alternatives | None = None

    def read(self) -> dict[str, _Alternatives]:
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
                self._add(_Item(name=symbol))
            case "literal":
                self._add(_Item(lark_string("".join(map(chr, self._code_points(match["literal"]))))))
            case "class":
                self._add(_Item(self._character_class(match["class"], negated=bool(match["negated"]))))
            case "token":
                self._add(_Item(self._token(symbol)))
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

    def _add(self, item: _Item) -> None:
        self._alternatives()[-1].append(item)

    def _alternatives(self) -> _Alternatives:
        if self._current is None:
            raise self._error("a symbol before the first rule (NAME ::= ...)")
        return self._current

    def _repeat(self, repeat: str) -> None:
        items = self._alternatives()[-1]
        if not items:
            raise self._error("a repetition of nothing")
        if repeat in ("{0}", "{0,0}"):
            items[-1] = _Item('""')  # Lark has no repetition of zero times
            return
        # In `a*{2}`, the second repetition applies to `a*` as a whole.
        items[-1] = _Item(group=[[items[-1]]], repeat=repeat)

    def _read_punctuation(self, symbol: str) -> None:
        alternatives = self._alternatives()
        if symbol == "|":
            alternatives.append([])
        elif symbol == ".":
            self._add(_Item(f"/[{_range(0, MAX_CODE_POINT)}]/"))
        elif symbol == "(":
            group: _Alternatives = [[]]
            self._add(_Item(group=group))
            self._open.append(alternatives)
            self._current = group
            if len(self._open) > MAX_NESTING:
                raise _rejected(f"its groups nest deeper than {MAX_NESTING} levels")
        elif self._open:
            self._current = self._open.pop()
        else:
            raise self._error("a group that is not opened")

    def _token(self, symbol: str) -> str:
        """Return a symbol such as `<[5]>` or `<think>` in Lark. `!<[5]>` becomes all tokens but this and end tokens."""
        name = symbol.removeprefix("!")
        number = _TOKEN_ID.fullmatch(name)
        token = int(number[1]) if number else self._token_of(name)
        if token is None:
            raise self._error(f"{name}, which is not one token of this model's vocabulary,")
        if name == symbol:
            return f"<[{token}]>"
        return f"<[^{','.join(map(str, sorted({token, *self._end_tokens})))}]>"

    def _character_class(self, text: str, *, negated: bool) -> str:
        """Return a character class such as `[a-z]` as a regular expression of Lark."""
        ranges: list[tuple[int, int]] = []
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
        return f"/[{''.join(_range(low, high) for low, high in ranges)}]/"

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
        return _rejected(f"it has {what} at line {line}, column {column}")


@dataclass(slots=True)
class _Writer:
    """Writes rules as Lark. Rules that cannot reach themselves and contain no token id become terminals."""

    rules: dict[str, _Alternatives]
    names: dict[str, str] = field(default_factory=dict)
    """Maps each rule to its name in Lark, where the names of terminals have capital letters."""

    def write(self, root: str) -> str:
        terminals = self._terminals()
        for number, name in enumerate(self.rules):
            self.names[name] = f"T{number}" if name in terminals else f"r{number}"
        lines = [f"start: {self.names[root]}"]
        lines += [f"{self.names[name]}: {self._alternatives(body)}" for name, body in self.rules.items()]
        return "\n".join(lines)

    def _terminals(self) -> set[str]:
        """Return the rules that refer only to terminals, directly and through other rules."""
        references: dict[str, set[str]] = {}
        for name, body in self.rules.items():
            items = list(_items(body))
            references[name] = {item.name for item in items if item.name is not None}
            if missing := references[name] - self.rules.keys():
                raise _rejected(f"rule {name!r} refers to {min(missing)!r}, which is not defined")
            if any(item.lark.startswith("<") for item in items):
                references[name].add(name)  # a token id cannot be part of a regular expression
        return _reducible(references)

    def _alternatives(self, body: _Alternatives) -> str:
        return " | ".join(" ".join(map(self._item, items)) or '""' for items in body)

    def _item(self, item: _Item) -> str:
        if item.name is not None:
            return self.names[item.name]
        if item.group is not None:
            return f"({self._alternatives(item.group)}){item.repeat}"
        return item.lark


def _items(body: _Alternatives) -> Iterator[_Item]:
    for items in body:
        for item in items:
            yield item
            yield from _items(item.group or [])


def _reducible(references: dict[str, set[str]]) -> set[str]:
    """Return the names from which no chain of references leads to a cycle.

    This is Kahn's algorithm on the reversed references.
    """
    n_open = {name: len(others) for name, others in references.items()}
    referring: dict[str, list[str]] = {name: [] for name in references}
    for name, others in references.items():
        for other in others:
            referring[other].append(name)
    found = [name for name, count in n_open.items() if not count]
    for name in found:  # the list grows while it is read
        for other in referring[name]:
            n_open[other] -= 1
            if not n_open[other]:
                found.append(other)
    return set(found)


def _complement(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of code points that are in none of `ranges`."""
    start = 0
    for low, high in sorted(ranges):
        if low > start:
            yield start, low - 1
        start = max(start, high + 1)
    if start <= MAX_CODE_POINT:
        yield start, MAX_CODE_POINT


def _range(low: int, high: int) -> str:
    return f"\\x{{{low:x}}}-\\x{{{high:x}}}"


def lark_string(text: str) -> str:
    """Return a literal as a string of Lark. Control characters are escaped, because Lark strings end with the line."""
    characters = (f"\\u{ord(one):04x}" if ord(one) < 0x20 or ord(one) == 0x7F else one for one in text)
    return '"' + "".join("\\" + one if one in '"\\' else one for one in characters) + '"'


def _rejected(reason: str) -> JobRejected:
    return JobRejected(ErrorCode.INVALID_GRAMMAR, f"the grammar cannot be used: {reason}")
