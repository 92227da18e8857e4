"""The regular expressions of JSON schemas: the keyword `pattern`, and the names of `patternProperties`."""

from __future__ import annotations

import re
from typing import Any

_KEYWORDS = ("pattern", "patternProperties")
_NO_NUL = r"&&[^\x00]]"
_SYMBOL = re.compile(
    r"""(?P<set> \\[pP](?:\{[^}]*\}|.) | \\(?:x00|u0000|U00000000|[xuU]\{0+\}) | \x00 )
      | \\. | \[(?!\^)[ -Z^-~]+\] | (?P<open> \[\^?\]? ) | (?P<close> \] ) | .""",
    re.VERBOSE | re.DOTALL,
)


def rewrite_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose regular expressions never match the character NUL. See `without_nul`."""
    if schema.keys().isdisjoint(_KEYWORDS):
        return schema
    result = dict(schema)
    if isinstance(schema.get("pattern"), str):
        result["pattern"] = without_nul(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        result["patternProperties"] = {without_nul(name): one for name, one in schema["patternProperties"].items()}
    return result


def without_nul(pattern: str) -> str:
    r"""Return a regular expression in which no set of characters has the character NUL.

    If a set has all control characters, llguidance also lets it match `\"` and `\\` in a string of JSON: `[^"]` would
    match what it forbids. Without NUL, it matches what it says. No string has this character anyway: `SCHEMA_OPTIONS`
    does not allow `\u0000`. A set of printable characters stays as it is.
    """
    if "[^" not in pattern and "\\" not in pattern and pattern.isprintable():
        return pattern
    parts: list[str] = []
    depth = 0
    for match in _SYMBOL.finditer(pattern):
        symbol = match.group()
        if match["open"]:
            # A bracket directly after the opening one stands for itself.
            parts.append("[" + symbol if not depth else symbol)
            depth += 1
        elif match["close"] and depth:
            depth -= 1
            parts.append(symbol + _NO_NUL if not depth else symbol)
        elif match["set"] and not depth:
            parts.append(f"[{symbol}{_NO_NUL}")
        else:
            parts.append(symbol)
    return "".join(parts) if not depth else pattern
