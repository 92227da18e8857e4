"""The bounds of numbers in JSON schemas.

llguidance reads bounds as floating-point numbers with 53 bits, cannot write each range of numbers with more than 18
digits, and takes an exclusive integer bound for an inclusive one where both bounds lie in one interval between
integers. This module replaces such bounds by narrower ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nextafter
from typing import Any

from llamaq.common.json_schema.references import refused

_EXACT = 2**53
"""Below it, each integer is a floating-point number."""
_LARGEST, _LAST = 10**18, 9 * 10**18
"""Ranges up to `_LARGEST` can be written, and ranges from it to `_LAST`."""
_STEP = 1e-9
"""An exclusive bound is moved by this number where it would be taken for an inclusive one."""
_KEYWORDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
BOUNDS = frozenset({"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"})
"""The keywords of bounds."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """A lower bound. An upper bound is the lower bound of the numbers multiplied by -1."""

    value: int | float
    is_exclusive: bool


def rewrite_bounds(schema: dict[str, Any], place: str, *, is_part: bool) -> dict[str, Any]:
    """Return a schema whose bounds llguidance enforces.

    Args:
        schema: The schema.
        place: Its place in the document.
        is_part: Whether the other bound may be in another schema that describes the same value.

    Raises:
        ValueError: There is no such schema.
    """
    schema = with_numbers(schema)
    given = _bound(schema, 0), _bound(schema, 1)
    bounds = [_exact(_limited(given[side], given[1 - side], place, side), given[side]) for side in (0, 1)]
    if schema.get("type") != "integer":
        bounds = [_inclusive(bounds[side], bounds[1 - side], place, side, is_part=is_part) for side in (0, 1)]
    for side, (bound, keywords) in enumerate(zip(bounds, _KEYWORDS, strict=True)):
        if bound is not None and bound != given[side]:
            schema = {key: value for key, value in schema.items() if key not in keywords}
            schema[keywords[bound.is_exclusive]] = -bound.value if side else bound.value
    return schema


def with_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose exclusive bounds are numbers. In draft 4 they are `true` or `false`, beside the bound."""
    for inclusive, exclusive in _KEYWORDS:
        is_exclusive = schema.get(exclusive)
        if isinstance(is_exclusive, bool):
            schema = {key: value for key, value in schema.items() if key != exclusive}
            if is_exclusive and inclusive in schema:
                schema[exclusive] = schema.pop(inclusive)
    return schema


def _bound(schema: dict[str, Any], side: int) -> _Bound | None:
    """Return the narrower of the two bounds on a side. None: it has no bound."""
    values = [(schema.get(keyword), is_exclusive) for is_exclusive, keyword in enumerate(_KEYWORDS[side])]
    bounds = [
        (-value if side else value, bool(is_exclusive))
        for value, is_exclusive in values
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return _Bound(*max(bounds)) if bounds else None


def _limited(bound: _Bound | None, opposite: _Bound | None, place: str, side: int) -> _Bound | None:
    """Return a bound that is within the numbers that can be written."""
    if bound is not None and bound.value > _LAST:
        raise refused(_KEYWORDS[side][bound.is_exclusive], place, f"is not supported beyond {_LAST}")
    if opposite is not None and opposite.value >= _LARGEST:  # all numbers are from `_LARGEST` to `_LAST`
        return bound if bound is not None and bound.value > -_LAST else _Bound(-_LAST, False)
    return _Bound(-_LARGEST, False) if bound is not None and bound.value < -_LARGEST else bound


def _exact(bound: _Bound | None, given: _Bound | None) -> _Bound | None:
    """Return the next bound that is a floating-point number."""
    if bound is None or abs(bound.value) < _EXACT:
        return bound
    value = float(bound.value)
    while value < bound.value or (bound.is_exclusive and value == bound.value):
        value = nextafter(value, inf)
    return given if given == _Bound(value, False) else _Bound(int(value), False)


def _inclusive(bound: _Bound | None, opposite: _Bound | None, place: str, side: int, *, is_part: bool) -> _Bound | None:
    """Return an inclusive bound for an integer that is exclusive, if the opposite bound is less than 1 away."""
    if bound is None or not bound.is_exclusive or bound.value != int(bound.value):
        return bound
    end = inf if opposite is None else -opposite.value
    is_near = bound.value < end and (is_part or end < bound.value + 1)
    if not is_near:
        return bound
    value = bound.value + max(_STEP, nextafter(abs(bound.value), inf) - abs(bound.value))
    if value > end:
        raise refused(_KEYWORDS[side][1], place, f"is not supported where the other bound is less than {_STEP} away")
    return _Bound(value, False)
