"""Removes the parts of a grammar in GBNF that no finite text matches, such as the rule `a ::= "x" a`.

No output could end there. For some of these grammars, such as `root ::= "x"* a` with `a ::= a "y"`, llguidance never
returns, because it looks for the end of the forced text `xxx…`.

Source: Hopcroft, Motwani and Ullman, Introduction to Automata Theory, Languages, and Computation (2001), section 7.1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from llamaq.worker.generation.grammar.gbnf_reader import EMPTY, Alternatives, Group, Reference, Symbol


def without_endless_rules(rules: dict[str, Alternatives]) -> dict[str, Alternatives]:
    """Return the rules that match a finite text, without the alternatives that match none."""
    finite: set[str] = set()
    order, n_before = list(rules), -1
    while len(finite) > n_before:
        n_before = len(finite)
        order.reverse()  # a rule may be defined before or after the rules that it refers to
        for name in order:
            if name not in finite and _finite_alternatives(rules[name], finite):
                finite.add(name)
    return {name: _finite_parts(body, finite) for name, body in rules.items() if name in finite}


def _finite_alternatives(body: Alternatives, finite: Collection[str]) -> Alternatives:
    """Return the alternatives that match a finite text, if the rules with the names `finite` do."""
    return [symbols for symbols in body if all(_is_finite(symbol, finite) for symbol in symbols)]


def _is_finite(symbol: Symbol, finite: Collection[str]) -> bool:
    match symbol:
        case Reference(name):
            return name in finite
        case Group(alternatives, least):
            return least == 0 or bool(_finite_alternatives(alternatives, finite))
    return True


def _finite_parts(body: Alternatives, finite: Collection[str]) -> Alternatives:
    """Return the alternatives that match a finite text, and in their groups only such alternatives."""
    return [[_finite_part(symbol, finite) for symbol in symbols] for symbols in _finite_alternatives(body, finite)]


def _finite_part(symbol: Symbol, finite: Collection[str]) -> Symbol:
    if not isinstance(symbol, Group):
        return symbol
    alternatives = _finite_parts(symbol.alternatives, finite)
    return replace(symbol, alternatives=alternatives) if alternatives else EMPTY
