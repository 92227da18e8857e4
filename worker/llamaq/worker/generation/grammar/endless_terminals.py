"""Finds the grammars in Lark in which a forced text may have no end.

llguidance matches each terminal with the longest possible text. In `T "a"` with `T: /a+/`, each text forces one more a,
and llguidance never returns, because it looks for the end of the forced text.

A forced text without an end repeats one part of a regular expression, and this part allows a single character at each
place. So a grammar has no such text if every part that it repeats without an upper bound is a set of two or more
characters, such as `[0-9]+`. This test reads only the text of the expressions, so it also finds grammars without an
endless forced text. Such a grammar is used without forced texts, and its outputs are the same.
"""

from __future__ import annotations

import re
from functools import lru_cache

from llamaq.worker.generation.grammar.gbnf_to_lark import NO_FORCING

_UNBOUNDED = r"[*+]|\{\d*,\}"
_SYMBOL = re.compile(
    rf"""(?://|\#)[^\n]*
      | "(?:\\.|[^"\\\n])*"
      | /(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[a-z]*)(?P<repetition>\s*(?:{_UNBOUNDED}))?
      | (?P<combination>[&~])
      | (?P<unbounded>{_UNBOUNDED})
      | ^[^\S\n]*[!?_]*(?P<name>(?P<rule>[a-z][\w-]*+(?!\s*\[))|[A-Za-z%])
    """,
    re.VERBOSE | re.MULTILINE,
)
"""What matters in a grammar. A rule with attributes, such as `text[lazy]`, is a terminal."""
_ATOM = r"(?:\\[dDsSwWnrt\W]|\[\^?\]?(?:\\.|(?!--|\|\|)[^][\\&~])+\]|[^][\\(){}|*+?^$])"
_ITEM = re.compile(
    rf"(?:(?P<set>\((?:\?[is]*:)?{_ATOM}(?:\|{_ATOM})*\)|{_ATOM})|\\.|.)(?P<unbounded>{_UNBOUNDED})?", re.DOTALL
)
"""A part of a regular expression. The sets are written in the same way for Rust and for Python."""
_OTHER_FLAGS = re.compile(r"\(\?(?![is]*[:)])")
_SAMPLE = "".join(map(chr, range(1, 0x250)))


def with_bounded_forcing(lark: str) -> str:
    """Return the grammar, which forces no text if a forced text may have no end."""
    return f"{lark}\n{NO_FORCING}" if _may_force_endless_text(lark) else lark


def _may_force_endless_text(lark: str) -> bool:
    is_rule = False
    for symbol in _SYMBOL.finditer(lark):
        if symbol["regex"] is not None:
            is_repeated = symbol["repetition"] is not None and not is_rule
            if "x" in symbol["flags"] or _repeats_one_text(symbol["regex"], is_repeated=is_repeated):
                return True
        elif symbol["combination"] or (symbol["unbounded"] and not is_rule):
            return True
        elif symbol["name"]:
            is_rule = symbol["rule"] is not None
    return False


def _repeats_one_text(regex: str, *, is_repeated: bool) -> bool:
    """Return whether a regular expression may repeat something without a bound that is no set of several characters.

    Args:
        regex: The expression.
        is_repeated: Whether all of it is repeated.
    """
    if _OTHER_FLAGS.search(regex) or (is_repeated and not _is_set(regex)):
        return True
    return any(item["unbounded"] and not _is_set(item["set"] or "") for item in _ITEM.finditer(regex))


@lru_cache
def _is_set(regex: str) -> bool:
    """Return whether an expression is a set of two or more characters."""
    item = _ITEM.fullmatch(regex)
    if item is None or item["set"] != regex:
        return False
    try:
        return len(re.findall(regex, _SAMPLE)) > 1
    except re.error:
        return False
