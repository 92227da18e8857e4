"""Translates a grammar in GBNF, the language of llama.cpp, into a Lark grammar for llguidance.

A rule or group that cannot reach itself becomes a terminal of Lark, which is one regular expression: llguidance matches
it much faster than a rule. llguidance matches each terminal with the longest possible text, as the lexer of a
programming language does, where llama.cpp tries every length. So a rule becomes a terminal only if the longest text is
never wrong (`LexemeConflicts`). The other rules, and the literals for which it may be wrong, are matched character by
character.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from llamaq.worker.generation.grammar.endless_rules import without_endless_rules
from llamaq.worker.generation.grammar.gbnf_reader import (
    Alternatives,
    CharacterClass,
    Group,
    Literal,
    Reference,
    Symbol,
    TokenSet,
    read_gbnf,
    rejected,
)
from llamaq.worker.generation.grammar.lexeme_conflicts import LexemeConflicts

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Stops llguidance from looking for forced texts. Where a longest text is wrong, a forced text may have no end: in
`t "a"` with `t ::= "a"+`, each text forces one more a, and llguidance never returns."""


def gbnf_to_lark(
    text: str,
    root: str,
    end_tokens: Collection[int] = (),
    token_of: Callable[[str], int | None] = lambda _: None,
) -> str:
    """Return the grammar as Lark. `is_exact` tells whether it allows all texts of the grammar in GBNF.

    Args:
        text: The grammar in GBNF.
        root: The name of the rule that the whole output must match.
        end_tokens: The tokens that end a generation; see `read_gbnf`.
        token_of: Returns the token with a text such as `<think>`. None: no single token has this text.

    Raises:
        JobRejected: The grammar has a syntax error, refers to a rule or a token that does not exist, nests too deep, or
            has no finite text.
    """
    rules = read_gbnf(text, end_tokens, token_of)
    if not rules:
        raise rejected("it has no rules")
    if root not in rules:
        raise rejected(f"it has no rule {root!r}; `grammar_root` names the rule that it starts with")
    try:
        _check_references(rules)
        rules = without_endless_rules(rules)
        if root not in rules:
            raise rejected(f"no text of its rule {root!r} has an end, so no token is allowed first")
        return _translate(_with_named_groups(rules), root)
    except RecursionError as exc:
        raise rejected("its repetitions nest too deep") from exc


def is_exact(lark: str) -> bool:
    """Return whether a result of `gbnf_to_lark` allows all texts of its grammar.

    If not, the comparison of its terminals was too long, and some of them match the longest possible text only.
    """
    return not lark.startswith(NO_FORCING)


def _translate(rules: dict[str, Alternatives], root: str) -> str:
    regular = _regular(rules)
    conflicts = LexemeConflicts(rules, root, regular)
    # In Lark, the names of terminals have capital letters.
    inside = _Writer({name: f"T{number}" for number, name in enumerate(rules)})
    outside = _Writer(
        {name: f"{'T' if name in conflicts.terminals else 'r'}{number}" for number, name in enumerate(rules)},
        conflicts.divided,
    )
    lines = [] if conflicts.is_exact else [NO_FORCING]
    lines += [f"start: {outside.names[root]}"]
    lines += [inside.rule(name, body) for name, body in rules.items() if name in regular]
    lines += [outside.rule(name, body) for name, body in rules.items() if name not in conflicts.terminals]
    return "\n".join(lines)


def lark_string(text: str) -> str:
    """Return a literal as a string of Lark. Control characters are escaped, because Lark strings end with the line."""
    characters = (f"\\u{ord(one):04x}" if ord(one) < 0x20 or ord(one) == 0x7F else one for one in text)
    return '"' + "".join("\\" + one if one in '"\\' else one for one in characters) + '"'


class _Writer:
    """Writes rules as Lark, either as terminals or outside of terminals.

    Args:
        names: Maps each rule to its name in Lark.
        divided: The literals that are written character by character.
    """

    def __init__(self, names: Mapping[str, str], divided: Collection[str] = ()) -> None:
        self.names = names
        self._divided = divided

    def rule(self, name: str, body: Alternatives) -> str:
        """Return a rule."""
        return f"{self.names[name]}: {self._alternatives(body)}"

    def _alternatives(self, body: Alternatives) -> str:
        return " | ".join(" ".join(map(self._symbol, symbols)) or '""' for symbols in body)

    def _symbol(self, symbol: Symbol) -> str:
        match symbol:
            case Reference(name):
                return self.names[name]
            case Literal(text):
                return " ".join(map(lark_string, text)) if text in self._divided else lark_string(text)
            case CharacterClass(ranges):
                return f"/[{''.join(_range(*one) for one in ranges)}]/"
            case TokenSet(tokens, is_negated):
                return f"<[{'^' if is_negated else ''}{','.join(map(str, tokens))}]>"
            case Group(alternatives, least, most):
                return f"({self._alternatives(alternatives)}){_repetition(least, most)}"


def _range(low: int, high: int) -> str:
    return f"\\x{{{low:x}}}-\\x{{{high:x}}}"


def _repetition(least: int, most: int | None) -> str:
    if (least, most) == (1, 1):
        return ""
    if most is None:
        return "*" if least == 0 else "+" if least == 1 else f"{{{least},}}"
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def _check_references(rules: dict[str, Alternatives]) -> None:
    """Raise `JobRejected` if a rule refers to one that does not exist."""
    for name, body in rules.items():
        if missing := _references(body) - rules.keys():
            raise rejected(f"rule {name!r} refers to {min(missing)!r}, which is not defined")


def _with_named_groups(rules: dict[str, Alternatives]) -> dict[str, Alternatives]:
    """Return the rules with each group as a rule of its own, so that it can be a terminal where its rule cannot."""
    named: dict[str, Alternatives] = {}

    def add(name: str, body: Alternatives) -> None:
        named[name] = []  # a rule is defined before those that it refers to
        named[name] = [[add_group(one) if isinstance(one, Group) else one for one in symbols] for symbols in body]

    def add_group(group: Group) -> Reference:
        name = f"({len(named)})"  # no rule of GBNF has such a name
        add(name, group.alternatives)
        named[name] = [[replace(group, alternatives=named[name])]]
        return Reference(name)

    for name, body in rules.items():
        add(name, body)
    return named


def _regular(rules: dict[str, Alternatives]) -> set[str]:
    """Return the rules that are regular expressions: they reach neither themselves nor a token."""
    references: dict[str, set[str]] = {}
    for name, body in rules.items():
        references[name] = _references(body)
        if any(isinstance(one, TokenSet) for one in _symbols(body)):
            references[name].add(name)  # a token cannot be part of a regular expression
    return _reducible(references)


def _references(body: Alternatives) -> set[str]:
    return {one.name for one in _symbols(body) if isinstance(one, Reference)}


def _symbols(body: Alternatives) -> Iterator[Symbol]:
    for symbols in body:
        for symbol in symbols:
            yield symbol
            if isinstance(symbol, Group):
                yield from _symbols(symbol.alternatives)


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
