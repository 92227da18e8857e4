"""The regular expressions of JSON schemas: the keyword `pattern`, and the names of `patternProperties`."""

from __future__ import annotations

import re
from typing import Any

from llamaq.common.json_schema.references import refused

_KEYWORDS = ("pattern", "patternProperties")
_NO_NUL = r"&&[^\x00]]"
_SPACE = {r"\s": r"[\s&&[^\x85]]", r"\S": r"[\S&&[^\x{FEFF}]]"}
_SPACE_IN_NEGATION = {r"\s": r"[\s\x{FEFF}]", r"\S": r"[\S\x85]"}
"""U+FEFF is white space in ECMA 262, and U+0085 in Rust. No set that is written with `\\s` or `\\S` has them."""
_SYMBOL = re.compile(
    r"""(?P<set> \\[pP](?:\{[^}]*\}|.) | \\(?:x00|u0000|U00000000|[xuU]\{0+\}) | \x00 )
      | (?P<space> \\[sS] ) | (?P<look> \(\?<?[=!] | \\[bB1-9] )
      | \\. | \[(?!\^)[ -Z^-~]+\] | (?P<open> \[\^?\]? ) | (?P<close> \] ) | .""",
    re.VERBOSE | re.DOTALL,
)


def rewrite_patterns(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a schema whose regular expressions never match the character NUL. See `narrowed`.

    Raises:
        ValueError: A regular expression looks at other characters than those that it matches.
    """
    if schema.keys().isdisjoint(_KEYWORDS):
        return schema
    result = dict(schema)
    if isinstance(schema.get("pattern"), str):
        result["pattern"] = _narrowed_at("pattern", schema["pattern"], place)
    if isinstance(schema.get("patternProperties"), dict):
        result["patternProperties"] = {
            _narrowed_at("patternProperties", name, place): one for name, one in schema["patternProperties"].items()
        }
    return result


def _narrowed_at(keyword: str, pattern: str, place: str) -> str:
    try:
        return narrowed(pattern)
    except ValueError as exc:
        raise refused(keyword, place, str(exc)) from exc


def narrowed(pattern: str) -> str:
    r"""Return a regular expression in which no set of characters has the character NUL.

    If a set has all control characters, llguidance also lets it match `\"` and `\\` in a string of JSON: `[^"]` would
    match what it forbids. Without NUL, it matches what it says. No string has this character anyway: `SCHEMA_OPTIONS`
    does not allow `\u0000`. A set of printable characters stays as it is.

    Raises:
        ValueError: The expression has look-around, a word boundary or a back-reference.
    """
    if "[^" not in pattern and "\\" not in pattern and "(?" not in pattern and pattern.isprintable():
        return pattern
    parts: list[str] = []
    are_negated: list[bool] = []  # of the sets that are open
    for match in _SYMBOL.finditer(pattern):
        symbol = match.group()
        if match["open"]:
            # A bracket directly after the opening one stands for itself.
            parts.append("[" + symbol if not are_negated else symbol)
            are_negated.append(symbol.startswith("[^"))
        elif match["close"] and are_negated:
            are_negated.pop()
            parts.append(symbol + _NO_NUL if not are_negated else symbol)
        elif match["set"] and not are_negated:
            parts.append(f"[{symbol}{_NO_NUL}")
        elif match["space"]:
            parts.append((_SPACE_IN_NEGATION if any(are_negated) else _SPACE)[symbol])
        elif match["look"] and not are_negated:
            raise ValueError(f"has `{symbol}`: look-around, word boundaries and back-references are not supported")
        else:
            parts.append(symbol)
    return "".join(parts) if not are_negated else pattern
