"""Converts JSON schemas for llguidance, and tells which of them compile in a short time.

Two things take llguidance much time or memory: the intersection of regular expressions, such as `allOf` with several
`pattern`, and counted repetitions inside each other, such as `(a{1000}){1000}`. A plain schema has neither, so it needs
no trial in the sandbox process. A trial takes as long as the compilation itself, and most schemas are plain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from llguidance import LLMatcher

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.json_schema.overlap import MAX_STEPS
from llamaq.common.json_schema.rewriting import SCHEMA_OPTIONS, NotCompared, rewrite_schema

MAX_PLAIN_CHARS = 16 * 1024
"""Largest plain schema, as JSON text. The most expensive ones of this size take 80 ms (integers with bounds)."""
MAX_PLAIN_SUBSCHEMAS = 200
"""Largest number of schemas in a plain schema, itself included."""
MAX_PLAIN_LENGTH = 1000
"""Largest size of a string or an array in a plain schema."""
MAX_PLAIN_STEPS = 20_000
"""Upper bound on the steps to compare the schemas of `oneOf` in a plain schema, which take at most 80 ms."""

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_ANNOTATIONS = frozenset({
    "$comment", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly",
})  # fmt: skip
_COMBINATIONS = tuple(
    frozenset(each.split())
    for each in (
        "$ref",
        "anyOf",
        "oneOf discriminator",
        "type const",
        "type enum",
        "type format",
        "type pattern",
        "type minLength maxLength",
        "type minimum maximum exclusiveMinimum exclusiveMaximum",
        "type items prefixItems minItems maxItems",
        "type properties required additionalProperties",
    )
)
"""The keywords that may stand at one level of a plain schema, besides annotations. llguidance makes no intersection of
regular expressions from any of these combinations."""
_COSTLY_PATTERN = re.compile(r"[)}*+?]\s*\{|\{[^}]*\d{4}|\(\?[^:]")
"""Finds in a pattern a counted repetition of a group or of a repetition, a count of four digits, and a group that may
change the syntax, such as `(?x`."""
_PLAIN_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/%~]+)?")
"""The references to the whole schema or to a definition, which are checked. Another one, such as `#/default`, may point
to a value that is not."""


def json_schema_grammar(schema: dict[str, Any], max_steps: int = MAX_STEPS) -> str:
    """Return a JSON schema in the form that `ConstraintTokenizer.compile` takes.

    Args:
        schema: The schema.
        max_steps: See `rewrite_schema`.

    Raises:
        JobRejected: The schema has a keyword that is not supported.
        NotCompared: See `rewrite_schema`.
    """
    options: Any = SCHEMA_OPTIONS  # a typed dictionary of llguidance, which `common` does not import
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(rewrite_schema(schema, max_steps)), overrides=options)
    except ValueError as exc:
        raise JobRejected(ErrorCode.INVALID_GRAMMAR, f"the JSON schema cannot be used: {exc}") from exc


def plain_schema_grammar(schema: dict[str, Any]) -> str | None:
    """Return what `json_schema_grammar` returns for a plain schema. None: the schema is not plain.

    Raises:
        JobRejected: The schema has a keyword that is not supported.
    """
    if _plain_levels([schema]) is None:
        return None
    try:
        return json_schema_grammar(schema, MAX_PLAIN_STEPS)
    except NotCompared:
        return None


def are_plain_rewritten_schemas(schemas: Sequence[Any]) -> bool:
    """Return whether rewritten JSON schemas are plain, and together no larger than one plain schema may be."""
    levels = _plain_levels(schemas)
    return levels is not None and not any("oneOf" in each for each in levels)


def _plain_levels(schemas: Sequence[Any]) -> list[dict[str, Any]] | None:
    """Return all schemas in the given ones, if they are plain as far as their keywords tell. Otherwise return None."""
    if not all(isinstance(schema, dict) for schema in schemas) or len(json.dumps(schemas)) > MAX_PLAIN_CHARS + 2:
        return None
    found: list[Any] = []
    for schema in schemas:
        definitions = [schema[name] for name in _DEFINITIONS & schema.keys()]
        if not all(isinstance(each, dict) for each in definitions):
            return None
        found.append({name: value for name, value in schema.items() if name not in _DEFINITIONS})
        found += chain.from_iterable(each.values() for each in definitions)
    for each in found:  # which gets longer meanwhile
        if len(found) > MAX_PLAIN_SUBSCHEMAS or not (isinstance(each, bool) or _is_plain_level(each)):
            return None
        found += [] if isinstance(each, bool) else _parts(each)
    return [each for each in found if isinstance(each, dict)]


def _is_plain_level(schema: Any) -> bool:
    """Return whether a value is an object with plain keywords. Those of its parts are not checked."""
    if not isinstance(schema, dict):
        return False
    keywords = schema.keys() - _ANNOTATIONS
    return any(keywords <= each for each in _COMBINATIONS) and all(_VALUES[name](schema[name]) for name in keywords)


def _parts(schema: dict[str, Any]) -> list[Any]:
    """Return the schemas that stand directly in a schema with plain keywords."""
    alone = [schema[name] for name in ("items", "additionalProperties") if name in schema]
    lists = (schema.get(name, ()) for name in ("anyOf", "oneOf", "prefixItems"))
    return [*alone, *chain.from_iterable(lists), *schema.get("properties", {}).values()]


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_PLAIN_LENGTH


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -(2**63) <= value < 2**63


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or _is_number(value)


def _is_type(value: Any) -> bool:
    return all(isinstance(each, str) and each in _TYPES for each in (value if isinstance(value, list) else [value]))


def _is_plain_reference(value: Any) -> bool:
    return isinstance(value, str) and _PLAIN_REFERENCE.fullmatch(value) is not None


def _is_plain_pattern(value: Any) -> bool:
    return isinstance(value, str) and not _COSTLY_PATTERN.search(value)


def _is_list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(is_item, value))


_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "$ref": _is_plain_reference,
    "additionalProperties": _is_schema,
    "anyOf": _is_list_of(_is_schema),
    "const": _is_scalar,
    "discriminator": lambda value: isinstance(value, dict),
    "enum": _is_list_of(_is_scalar),
    "format": _is_text,
    "items": _is_schema,
    "oneOf": _is_list_of(_is_schema),
    "pattern": _is_plain_pattern,
    "prefixItems": _is_list_of(_is_schema),
    "properties": lambda value: isinstance(value, dict),
    "required": lambda value: value == [] or _is_list_of(_is_text)(value),
    "type": _is_type,
    **dict.fromkeys(("maxItems", "maxLength", "minItems", "minLength"), _is_size),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"), _is_number),
}
"""Tells for each plain keyword whether a value is valid and plain."""
