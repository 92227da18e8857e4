"""Checks a grammar without running it: size, nesting depth, left recursion and token references.

llama_sampler_init_grammar recurses once for each level of nesting, so a deep grammar overflows the stack. It does not
detect left recursion after a rule that can be empty only because another rule can be empty. On such a grammar it
allocates memory without end. llama_sampler_accept ends the process on some grammars that refer to tokens by id. GBNF,
the language of the grammars, is described in grammars/README.md of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_request import MAX_GRAMMAR_BYTES

MAX_NESTING = 64
"""Upper bound on the levels of groups in a grammar, and of values in a JSON schema."""
MAX_GBNF_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Upper bound on a grammar in GBNF. A request has a smaller bound: a JSON schema is shorter than its GBNF."""

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


def check_grammar(text: str) -> None:
    """Raise `JobRejected` for a grammar in GBNF that is not safe to parse with llama.cpp."""
    if len(text.encode(errors="replace")) > MAX_GBNF_BYTES:
        raise _rejected(f"it is larger than {MAX_GBNF_BYTES} bytes as GBNF")
    if "\0" in text:
        raise _rejected("it contains a NUL character")
    rules = _RuleReader().read(text)
    if not rules:
        raise _rejected("it has no rules")
    _check_left_recursion(rules)


def check_schema_nesting(value: object) -> None:
    """Raise `JobRejected` for a JSON schema with more than `MAX_NESTING` levels."""
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
    """A symbol in a rule: the name of a rule, a group, or (if both are None) a literal."""

    name: str | None = None
    group: list[list[_Item]] | None = None
    is_optional: bool = False


_Alternatives = list[list[_Item]]


class _RuleReader:
    """Reads the rules of a grammar. It ignores syntax errors, because the parser of llama.cpp reports them."""

    def __init__(self) -> None:
        self.rules: dict[str, _Alternatives] = {}
        self._open: list[_Alternatives] = []
        """For each group that is not closed yet: the alternatives that contain the group."""
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
                    raise _rejected(f"it refers to a token, {symbol[:40]}: write the token's text instead")
                case "repeat":
                    self._read_repetition(symbol)
                case "other":
                    self._read_punctuation(symbol)
        return self.rules

    def _begin_rule(self, name: str) -> None:
        self._current = self.rules.setdefault(name, [])
        self._current.append([])
        self._open.clear()

    def _add(self, item: _Item) -> None:
        self._current[-1].append(item)

    def _read_repetition(self, symbol: str) -> None:
        if self._current[-1] and _OPTIONAL.fullmatch(symbol):
            self._current[-1][-1].is_optional = True

    def _read_punctuation(self, symbol: str) -> None:
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
    """Reject a grammar in which a rule can start with itself, directly or through other rules."""
    nullable: set[str] = set()
    while True:
        found = {name for name, alternatives in rules.items() if _can_be_empty(alternatives, nullable)}
        if found == nullable:
            break
        nullable = found
    first_rules = {name: set(_first_rules(alternatives, nullable)) for name, alternatives in rules.items()}
    done: set[str] = set()  # rules from which the search has found no cycle
    for name in rules:
        _check_rule(name, first_rules, done)


def _can_be_empty(alternatives: _Alternatives, nullable: set[str]) -> bool:
    return any(all(_item_can_be_empty(item, nullable) for item in items) for items in alternatives)


def _item_can_be_empty(item: _Item, nullable: set[str]) -> bool:
    if item.is_optional or item.name in nullable:
        return True
    return item.group is not None and _can_be_empty(item.group, nullable)


def _first_rules(alternatives: _Alternatives, nullable: set[str]) -> Iterator[str]:
    """Yield the names of the rules that can be the first symbol of the alternatives."""
    for items in alternatives:
        for item in items:
            if item.name is not None:
                yield item.name
            elif item.group is not None:
                yield from _first_rules(item.group, nullable)
            if not _item_can_be_empty(item, nullable):
                break


def _check_rule(start: str, first_rules: dict[str, set[str]], done: set[str]) -> None:
    """Search depth-first from a rule through the rules that can be first, and reject a cycle.

    The search keeps its path in a dict instead of recursing, because chains of rules can be long.
    """
    path: dict[str, Iterator[str]] = {start: iter(first_rules[start])} if start not in done else {}
    while path:
        name = next(reversed(path))
        for first in path[name]:
            if first in path:
                raise _rejected(f"rule {first!r} is left-recursive: it can start with itself")
            if first in first_rules and first not in done:
                path[first] = iter(first_rules[first])
                break
        else:
            done.add(name)
            del path[name]


def _rejected(reason: str) -> JobRejected:
    return JobRejected(ErrorCode.INVALID_GRAMMAR, f"the grammar cannot be used: {reason}")
