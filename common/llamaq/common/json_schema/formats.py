"""The keyword `format` of JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

IMPLEMENTED = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""The formats that llguidance implements."""
NARROWER: Mapping[str, str] = MappingProxyType(
    {
        "idn-email": "email",
        "idn-hostname": "hostname",
        "uri-reference": "uri",
        "uri-template": "uri",
        "iri": "uri",
        "iri-reference": "uri",
    }
)
"""Maps a format to another one whose strings all have this format too."""
_POINTER = "(/([^~/]|~[01])*)*"
_BASE64 = "^([{0}]{{4}})*([{0}]{{2}}==|[{0}]{{3}}=)?$"
_HEX = "[0-9a-f]"
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "json-pointer": f"^{_POINTER}$",
        "relative-json-pointer": f"^(0|[1-9][0-9]{{0,8}})(#|{_POINTER})$",
        "regex": "^[A-Za-z0-9 _,;:=/@-]*$",  # letters and digits stand for themselves in a regular expression
        "byte": _BASE64.format("A-Za-z0-9+/"),
        "base64": _BASE64.format("A-Za-z0-9+/"),
        "base64url": _BASE64.format("A-Za-z0-9_-"),
        **{
            f"uuid{version}": f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}$"
            for version in range(1, 9)
        },
    }
)
"""Maps formats to regular expressions whose strings have the format."""


def rewrite_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose format llguidance implements.

    Formats that the standard does not define, such as `password` or `int32`, are left out: they do not constrain a
    value.
    """
    name = schema.get("format")
    if not isinstance(name, str) or name in IMPLEMENTED:
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    if name in NARROWER:
        return {**rest, "format": NARROWER[name]}
    if name not in PATTERNS:
        return rest
    if "pattern" not in rest:
        return {**rest, "pattern": PATTERNS[name]}
    others = rest.get("allOf")
    return {**rest, "allOf": [*(others if isinstance(others, list) else []), {"pattern": PATTERNS[name]}]}
