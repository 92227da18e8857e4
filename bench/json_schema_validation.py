"""Checks outputs against their JSON schemas with the `jsonschema` package, numbers and formats included."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for

_TIME = r"\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)"
_LABEL = r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)"
_POINTER = "(/([^~/]|~[01])*)*"
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date-time": rf"\d{{4}}-\d\d-\d\d[Tt]{_TIME}",
        "time": _TIME,
        "hostname": rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*",
        "duration": r"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)",
        "json-pointer": _POINTER,
        "relative-json-pointer": rf"(0|[1-9]\d*)(#|{_POINTER})",
        "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]*",
    }
)
"""The formats that `jsonschema` checks only with further packages, after their definitions in the RFCs."""


def validation_error(schema: dict[str, Any], text: str) -> str | None:
    """Return why a text is not JSON or does not match a schema, or None. Decimal fractions are exact."""
    try:
        value = json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
    except ValueError as exc:
        return f"not JSON: {exc}"
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = validator_for(exact, default=Draft202012Validator)(exact, format_checker=_format_checker())
    error = next(validator.iter_errors(value), None)
    return None if error is None else f"{error.json_path}: {error.message}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _format_checker() -> FormatChecker:
    checker = FormatChecker()
    for name in FORMATS:
        checker.checks(name)(lambda value, name=name: not isinstance(value, str) or _has_format(name, value))
    return checker


def _has_format(name: str, value: str) -> bool:
    if not re.fullmatch(FORMATS[name], value):
        return False
    if name not in ("date-time", "time"):
        return True
    # Python has no leap seconds, and not all fractions of them.
    plain = re.sub(r"\.\d+", "", value).upper().replace(":60", ":59")
    try:
        (dt.time if name == "time" else dt.datetime).fromisoformat(plain)
    except ValueError:
        return False
    return True
