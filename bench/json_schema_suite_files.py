"""Reads JSON schemas, and the instances that are valid or invalid for them, from the files of a suite.

Files have one of these forms: a list of cases `{"schema": ..., "tests": [{"data": ..., "valid": ...}]}`, as in the JSON
Schema Test Suite; one such case; one schema; or an object that maps names to schemas. Other files are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

MAX_ORDERS = 150
"""Number of orders of the properties of an instance that are tried."""
_OF_SCHEMAS = frozenset({
    "$schema", "$ref", "$defs", "definitions", "type", "properties", "patternProperties", "additionalProperties",
    "items", "enum", "const", "anyOf", "allOf", "oneOf", "not",
})  # fmt: skip
"""Keywords that tell a schema from a catalogue of schemas."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A value, and whether it is valid for the schema of its case."""

    description: str
    value: Any
    is_valid: bool


@dataclass(frozen=True, slots=True)
class Case:
    """A schema with its instances, if the suite has any."""

    name: str
    schema: Any
    instances: tuple[Instance, ...] = ()


def read_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of all files in a folder, in the order of their names."""
    for path in sorted(folder.rglob("*.json")):
        name = str(path.relative_to(folder).with_suffix(""))
        try:
            content = json.loads(path.read_text())
        except (ValueError, RecursionError):
            continue
        yield from _cases(name, content)


def _cases(name: str, content: Any) -> Iterator[Case]:
    if isinstance(content, list):
        for one in content:
            if isinstance(one, dict) and "schema" in one:
                yield from _cases(name, one)
    elif isinstance(content, dict) and isinstance(content.get("tests"), list) and "schema" in content:
        tests = [one for one in content["tests"] if "data" in one and "valid" in one]
        instances = [Instance(str(one.get("description", "")), one["data"], one["valid"]) for one in tests]
        description = content.get("description", "")
        yield Case(f"{name}: {description}" if description else name, content["schema"], tuple(instances))
    elif isinstance(content, dict) and not _OF_SCHEMAS.isdisjoint(content):
        yield Case(name, content)
    elif isinstance(content, dict):
        for key, one in content.items():
            if isinstance(one, dict) and not _OF_SCHEMAS.isdisjoint(one):
                yield Case(f"{name}: {key}", one)


def spellings(value: Any, *, plain_numbers: bool = True) -> Iterator[str]:
    """Yield texts of JSON that all mean the same value. The first one is that of `json.dumps`.

    The properties are in different orders, and white space is different.

    Args:
        value: The value.
        plain_numbers: Write numbers without exponents and without a fraction of zeros. In draft 4, `1.0` is no integer.
    """
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(value, ensure_ascii=False, indent=2)
    for one in islice(_orders(value), MAX_ORDERS):
        yield _with_plain_numbers(one) if plain_numbers else json.dumps(one, ensure_ascii=False)


def _orders(value: Any) -> Iterator[Any]:
    """Yield a value with all orders of the properties of its objects."""
    if isinstance(value, list):
        yield from map(list, product(*(list(islice(_orders(one), MAX_ORDERS)) for one in value)))
    elif isinstance(value, dict):
        parts = [list(islice(_orders(one), MAX_ORDERS)) for one in value.values()]
        for names in islice(permutations(value), MAX_ORDERS):
            for values in product(*parts):
                by_name = dict(zip(value, values, strict=True))
                yield {name: by_name[name] for name in names}
    else:
        yield value


def _with_plain_numbers(value: Any) -> str:
    if isinstance(value, dict):
        members = (f"{json.dumps(key, ensure_ascii=False)}: {_with_plain_numbers(one)}" for key, one in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_with_plain_numbers, value))}]"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{Decimal(repr(value)):f}"
    return json.dumps(value, ensure_ascii=False)
