"""The keyword `format` of JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

IMPLEMENTED = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""The formats whose implementation in llguidance is used."""
NARROWER: Mapping[str, str] = MappingProxyType(
    {
        "idn-email": "email",
        "host-name": "hostname",  # the names of draft 3
        "ip-address": "ipv4",
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
_LABEL = "[A-Za-z0-9](-?[A-Za-z0-9]){0,30}"  # without "--", which only an encoded label may have
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # many libraries have no year 0
_LEAP = "(0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"({_YEAR}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    f"|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR_AND_MINUTE})"
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "date": f"^{_DATE}$",  # llguidance has a February 30, and a second 60
        "time": f"^{_TIME}$",
        "date-time": f"^{_DATE}T{_TIME}$",
        "idn-hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
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
