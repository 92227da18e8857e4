"""Checks of arguments that are no fields of a request. Each raises an `InvalidRequest` that names the argument."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Iterable, Mapping

from llamaq.common.errors import InvalidRequest


def check_count(name: str, value: object, least: int, most: float = math.inf) -> None:
    """Check that an argument is a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        bounds = f"of {least} or more" if most == math.inf else f"between {least} and {most}"
        raise InvalidRequest(f"{name}: {_short(value)} is not a whole number {bounds}")


def check_seconds(name: str, value: object) -> None:
    """Check that an argument is a number of seconds. 0 and infinity are allowed."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:  # NaN is not >= 0 either
        raise InvalidRequest(f"{name}: {_short(value)} is not a number of seconds: use 0 or more")


def check_text(name: str, value: object, max_chars: int) -> None:
    """Check that an argument is a text of 1 to `max_chars` characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= max_chars:
        raise InvalidRequest(f"{name}: a text of 1 to {max_chars} characters is required")


def check_list(name: str, value: object) -> None:
    """Check that an argument is iterable. A text or a mapping is one item, not a list of items."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable | AsyncIterable):
        raise InvalidRequest(f"{name}: a list is required, not {_short(value)}")


def _short(value: object) -> str:
    return repr(value)[:100]
