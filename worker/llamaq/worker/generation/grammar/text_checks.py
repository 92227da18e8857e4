"""What can be said of a grammar by reading it: its size, its nesting, its left recursion, its token references.

llama.cpp recurses as deep as a grammar nests; it overlooks left recursion behind a rule that can be empty by way of
another, and then grows without end; and it aborts on some grammars that refer to tokens by id. GBNF is described in
llama.cpp's grammars/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_request import MAX_GRAMMAR_BYTES

MAX_NESTING = 64
MAX_GBNF_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Of a grammar made from a JSON schema."""

_SYMBOL = re.compile(
    r"""(?P<space> \s+ | \#[^\r\n]* )
      | (?P<literal> "(?:\\.|[^"\\])*" | \[(?:\\.|[^\]\\])*\] )
      | (?P<token> !?<[^>]*> )
      | (?P<name> [A-Za-z0-9\-]+ ) (?P<defines> [\ \t]* ::= )?
      | (?P<repeat> [*+?] | \{[^}]*\} )
      | (?P<other> . )""",
    re.VERBOSE | re.DOTALL,
)
_EMPTY_LITERALS = frozenset({'""', "[]", "[^]"})
_OPTIONAL = re.compile(r"[*?]|\{\s*0+\s*[,}].*", re.DOTALL)


def check_text(text: str) -> None:
    """Raise `JobRejected` for a grammar that llama.cpp should not even parse."""
    if len(text.encode(errors="replace")) > MAX_GBNF_BYTES:
        raise _rejected(f"it is larger than {MAX_GBNF_BYTES} bytes as GBNF")
    if "\0" in text:
        raise _rejected("it contains a NUL character")
    rules = _RuleReader().read(text)
    if not rules:
        raise _rejected("it has no rules")
    _check_left_recursion(rules)


def check_nesting(value: object) -> None:
    """Raise `JobRejected` for a JSON schema that nests too deep."""
    level: list[object] = [value]
    for _ in range(MAX_NESTING):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise _rejected(f"the schema nests deeper than {MAX_NESTING} levels")


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


@dataclass(slots=True)
class _Item:
    """A symbol: a rule's name, a group, or a literal."""

    name: str | None = None
    group: list[list[_Item]] | None = None
    is_optional: bool = False


_Alternatives = list[list[_Item]]


class _RuleReader:
    """Reads rules as far as they are well formed; llama.cpp's own parser reports what is not."""

    def __init__(self) -> None:
        self.rules: dict[str, _Alternatives] = {}
        self._open: list[_Alternatives] = []
        """What the groups stand in that are not closed yet."""
        self._current: _Alternatives = [[]]

    def read(self, text: str) -> dict[str, _Alternatives]:
        for match in _SYMBOL.finditer(text):
            symbol = match.group()
            match match.lastgroup:
                case "defines":
                    self._begin_rule(match["name"])
                case "name":
                    self._add(_Item(name=symbol))
                case "literal":
                    self._add(_Item(is_optional=symbol in _EMPTY_LITERALS))
                case "token":
                    raise _rejected(f"it refers to a token, {symbol[:40]}: write the text instead")
                case "repeat":
                    self._repeat(symbol)
                case "other":
                    self._punctuate(symbol)
        return self.rules

    def _begin_rule(self, name: str) -> None:
        self._current = self.rules.setdefault(name, [])
        self._current.append([])
        self._open.clear()

    def _add(self, item: _Item) -> None:
        self._current[-1].append(item)

    def _repeat(self, symbol: str) -> None:
        if self._current[-1] and _OPTIONAL.fullmatch(symbol):
            self._current[-1][-1].is_optional = True

    def _punctuate(self, symbol: str) -> None:
        if symbol == "|":
            self._current.append([])
        elif symbol == ".":
            self._add(_Item())
        elif symbol == "(":
            group: _Alternatives = [[]]
            self._add(_Item(group=group))
            self._open.append(self._current)
            self._current = group
            if len(self._open) > MAX_NESTING:
                raise _rejected(f"its groups nest deeper than {MAX_NESTING} levels")
        elif symbol == ")" and self._open:
            self._current = self._open.pop()


def _check_left_recursion(rules: dict[str, _Alternatives]) -> None:
    nullable: set[str] = set()
    while True:
        found = {name for name, alternatives in rules.items() if _can_be_empty(alternatives, nullable)}
        if found == nullable:
            break
        nullable = found
    firsts = {name: set(_firsts(alternatives, nullable)) for name, alternatives in rules.items()}
    done: set[str] = set()
    for name in rules:
        _follow(name, firsts, done)


def _can_be_empty(alternatives: _Alternatives, nullable: set[str]) -> bool:
    return any(all(_item_can_be_empty(item, nullable) for item in items) for items in alternatives)


def _item_can_be_empty(item: _Item, nullable: set[str]) -> bool:
    if item.is_optional or item.name in nullable:
        return True
    return item.group is not None and _can_be_empty(item.group, nullable)


def _firsts(alternatives: _Alternatives, nullable: set[str]) -> Iterator[str]:
    """Rules that can stand at the very beginning."""
    for items in alternatives:
        for item in items:
            if item.name is not None:
                yield item.name
            elif item.group is not None:
                yield from _firsts(item.group, nullable)
            if not _item_can_be_empty(item, nullable):
                break


def _follow(start: str, firsts: dict[str, set[str]], done: set[str]) -> None:
    """Walk depth-first from a rule along what can stand first; without recursion, as chains may be long."""
    path: dict[str, Iterator[str]] = {start: iter(firsts[start])} if start not in done else {}
    while path:
        name = next(reversed(path))
        for first in path[name]:
            if first in path:
                raise _rejected(f"rule {first!r} is left-recursive: it can begin with itself")
            if first in firsts and first not in done:
                path[first] = iter(firsts[first])
                break
        else:
            done.add(name)
            del path[name]


def _rejected(why: str) -> JobRejected:
    return JobRejected(ErrorCode.INVALID_GRAMMAR, f"the grammar cannot be used: {why}")
