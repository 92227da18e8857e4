"""Hostile JSON schemas: they are rewritten or refused in a bounded time, and in bounded memory."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from llamaq.common.json_schema.rewriting import rewrite_schema


def nested_names(depth: int) -> dict[str, Any]:
    """Return a schema of objects in objects, each with one of two names."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": schema}
    return schema


def nested_parts(depth: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema with `allOf` in `allOf`, the innermost one with these schemas."""
    schema: dict[str, Any] = {"allOf": parts}
    for _ in range(depth):
        schema = {"allOf": [schema]}
    return schema


NAMES = [f"p{number}" for number in range(2500)]
HOSTILE: dict[str, dict[str, Any]] = {
    "equal references to many values": {
        "oneOf": [{"$ref": "#/$defs/a"} for _ in range(900)],
        "$defs": {"a": {"enum": list(range(5500))}},
    },
    "many alternatives beside many parts": {"oneOf": [{"allOf": [1] * 7000, "anyOf": [1] * 7000} for _ in range(2)]},
    "many required names": {
        "oneOf": [{"$ref": "#/$defs/a", "properties": {f"q{number}": True}} for number in range(200)],
        "$defs": {"a": {"type": "object", "required": NAMES, "properties": {"p0": {"const": 1}}}},
    },
    "many references below another base": {
        "properties": {name: {"$ref": "#/$defs/b/properties/c"} for name in NAMES[:1100]},
        "$defs": {"b": {"$id": "https://a.com/", "properties": {"c": {"enum": ["x" * 25] * 1000}}}},
    },
    "many multiples with many digits": nested_parts(100, [{"multipleOf": 1e-300}] * 2000),
    "multiples of many shared properties": {
        "allOf": [
            {"properties": {name: {"$ref": f"#/allOf/{part}"} for name in NAMES[:500]}, "multipleOf": 3}
            for part in range(2)
        ]
    },
    "copies of copies for each name": nested_names(60),
    "copies for many names": {
        "propertyNames": {"enum": NAMES[:800]},
        "additionalProperties": {"anyOf": [{"type": "string", "maxLength": n} for n in range(190)]},
    },
}
MAX_REWRITING_S = 2.0
"""Processor time for a hostile schema. Those above take up to 0.4 s on a slow machine."""


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_schema_is_rewritten_or_refused_in_a_bounded_time(schema: dict[str, Any]) -> None:
    started_s = time.process_time()
    with suppress(ValueError):
        rewrite_schema(schema)
    assert time.process_time() - started_s < MAX_REWRITING_S


def test_a_schema_that_grows_too_much_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"more than 10000 schemas; each name in propertyNames"):
        rewrite_schema(nested_names(60))


def test_the_memory_for_hostile_alternatives_is_bounded() -> None:
    tracemalloc.start()
    try:
        with suppress(ValueError):
            rewrite_schema(HOSTILE["many alternatives beside many parts"])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50_000_000
