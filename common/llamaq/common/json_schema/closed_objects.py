"""Closes the objects of a JSON schema: they have only the properties that it names.

A small model would write further properties without end. llama-server does the same.
"""

from __future__ import annotations

from typing import Any

from llamaq.common.json_schema.rewriting import subschemas

_IN_PLACE = frozenset({"$ref", "anyOf", "oneOf"})
_OF_OBJECTS = frozenset({"properties", "patternProperties", "additionalProperties", "required", "minProperties"})


def close_objects(root: dict[str, Any]) -> None:
    """Add `additionalProperties: false` to the objects of a schema that `rewrite_schema` has returned.

    Unchanged are objects that have `additionalProperties`, `minProperties` or `allOf`, that require a property which
    they do not name, or that several parts of the schema describe together, with the objects in them.
    """
    schemas = [root]
    for schema in schemas:
        schemas += subschemas(schema)
    shared: set[int] = set()
    waiting = [part for schema in schemas for part in _overlapping(schema)]
    while waiting:
        schema = waiting.pop()
        if id(schema) not in shared:
            shared.add(id(schema))
            waiting += subschemas(schema)
            if "$ref" in schema:
                waiting.append(_target(root, schema["$ref"]))
    for schema in schemas:
        if id(schema) not in shared and _names_all(schema):
            schema["additionalProperties"] = False


def _overlapping(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas of objects that other parts of a schema describe too, so that none names all properties."""
    all_of = schema.get("allOf")
    n_parts = (len(all_of) if isinstance(all_of, list) else 0) + len(_IN_PLACE & schema.keys())
    if n_parts + (not _OF_OBJECTS.isdisjoint(schema)) > 1:
        return [schema]
    return subschemas(schema) if {"properties", "patternProperties"} <= schema.keys() else []


def _target(root: dict[str, Any], ref: str) -> dict[str, Any]:
    target = root if ref == "#" else root["$defs"][ref.rpartition("/")[2]]
    return target if isinstance(target, dict) else {}


def _names_all(schema: dict[str, Any]) -> bool:
    """Return whether a schema names properties, and its other keywords need no more."""
    names, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(names, dict) or not isinstance(required, list):
        return False
    is_free = "additionalProperties" in schema or "minProperties" in schema
    return bool(names) and not is_free and names.keys() >= set(map(str, required))
