"""Converts JSON schemas for llguidance, and tells which of them compile in a short time.

Two things take llguidance much time or memory: the intersection of many regular expressions, such as `allOf` with
several `pattern`, and counted repetitions inside each other, such as `(a{1000}){1000}`. A plain schema has neither, so
it needs no trial in the sandbox process. A trial takes as long as the compilation itself, and most schemas are plain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from llguidance import LLMatcher

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.json_schema.formats import PATTERNS
from llamaq.common.json_schema.object_keywords import NAME_FORMATS
from llamaq.common.json_schema.overlap import MAX_STEPS
from llamaq.common.json_schema.patterns import narrowed
from llamaq.common.json_schema.rewriting import SCHEMA_OPTIONS, NotCompared, rewrite_schema

MAX_PLAIN_CHARS = 16 * 1024
"""Largest plain schema, as JSON text. The most expensive ones of this size take 80 ms (integers with bounds)."""
MAX_PLAIN_SUBSCHEMAS = 200
"""Largest number of schemas in a plain schema, itself included."""
MAX_PLAIN_INTERSECTIONS = 50
"""Largest number of schemas with an intersection of two regular expressions in a plain schema. An intersection takes up
to 1 ms (`format` of a URI, with a length)."""
MAX_PLAIN_LENGTH = 4000
"""Largest length of a string in a plain schema."""
MAX_PLAIN_ITEMS = 1000
"""Largest size of an array or an object in a plain schema."""
MAX_PLAIN_FACTOR = 128
"""Largest `multipleOf` in a plain schema, without its decimal point: 125 for 0.125. llguidance makes an automaton with
as many states, and 999,983 states take 16 s."""
MAX_PLAIN_STEPS = 20_000
"""Upper bound on the steps to compare the schemas of `oneOf` in a plain schema, which take at most 80 ms."""

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_DEFINITIONS = "$defs"
_BESIDE_STRINGS = """
    type minimum maximum exclusiveMinimum exclusiveMaximum multipleOf items prefixItems minItems maxItems
    properties patternProperties additionalProperties required minProperties maxProperties
"""
_COMBINATIONS = tuple(
    frozenset(each.split())
    for each in (
        "$ref",
        "allOf",
        "anyOf",
        "type const",
        "type enum",
        f"format minLength maxLength {_BESIDE_STRINGS}",
        f"pattern minLength maxLength {_BESIDE_STRINGS}",
    )
)
"""The keywords that may stand at one level of a plain schema. llguidance intersects no more than two regular
expressions for any of these combinations."""
_INTERSECTED = tuple(
    (frozenset(each.split()), frozenset(others.split()))
    for each, others in (
        ("pattern format", "minLength maxLength"),
        ("multipleOf", "minimum maximum exclusiveMinimum exclusiveMaximum"),
        ("patternProperties", "properties additionalProperties"),
    )
)
"""Keywords, and others beside which each of them becomes an intersection."""
_COSTLY_PATTERN = re.compile(r"[)}*+?]\s*\{|\{[^{}]*\d{4}|\(\?[^:]")
"""Finds in a pattern a counted repetition of a group or of a repetition, a count of four digits, and a group that may
change the syntax, such as `(?x`."""
_KNOWN_PATTERNS = frozenset(map(narrowed, (*PATTERNS.values(), *NAME_FORMATS.values())))
"""The patterns of formats. Some of them have counted groups, but small ones."""
_PREFIX = re.compile(r"\^[\w/-]+")
"""Finds the pattern of all names with a prefix, such as `^x-`."""
_PLAIN_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/%~]+)?")
"""The references to the whole schema or to a definition. Each definition has only one such reference, so a schema with
no other references is not much larger when it is rewritten."""


def json_schema_grammar(schema: dict[str, Any]) -> str:
    """Return a JSON schema in the form that `ConstraintTokenizer.compile` takes.

    Raises:
        JobRejected: The schema has a keyword that is not supported.
    """
    return _grammar(_rewritten(schema, MAX_STEPS))


class PlainGrammar(NamedTuple):
    """A plain schema."""

    text: str
    """What `json_schema_grammar` returns."""
    part_of_limits: float
    """See `part_of_limits`."""


def plain_schema_grammar(schema: dict[str, Any]) -> PlainGrammar | None:
    """Return the grammar of a plain schema. None: the schema is not plain.

    Raises:
        JobRejected: The schema has a keyword that is not supported.
    """
    if not _is_rewritten_soon(schema):
        return None
    try:
        rewritten = _rewritten(schema, MAX_PLAIN_STEPS)
    except NotCompared:
        return None
    part = part_of_limits([rewritten])
    return PlainGrammar(_grammar(rewritten), part) if part <= 1 else None


def _rewritten(schema: dict[str, Any], max_steps: int) -> dict[str, Any]:
    try:
        return rewrite_schema(schema, max_steps)
    except ValueError as exc:
        raise JobRejected(ErrorCode.INVALID_GRAMMAR, f"the JSON schema cannot be used: {exc}") from exc


def _grammar(rewritten: dict[str, Any]) -> str:
    options: Any = SCHEMA_OPTIONS  # a typed dictionary of llguidance, which `common` does not import
    return LLMatcher.grammar_from_json_schema(json.dumps(rewritten), overrides=options)


def _is_rewritten_soon(schema: dict[str, Any]) -> bool:
    """Return whether it takes a short time to rewrite a schema, and the result is not much larger."""
    if len(json.dumps(schema)) > MAX_PLAIN_CHARS:
        return False
    found: list[dict[str, Any]] = []
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            found.append(value)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    refs = [each["$ref"] for each in found if "$ref" in each]
    if len(found) > 2 * MAX_PLAIN_SUBSCHEMAS or not all(map(_is_plain_reference, refs)):
        return False
    return not any(_lists_names(each["propertyNames"]) for each in found if "propertyNames" in each)


def _lists_names(schema: Any) -> bool:
    """Return whether a value of `propertyNames` may list names. Each becomes a copy of `additionalProperties`."""
    return isinstance(schema, dict) and not schema.keys().isdisjoint({"$ref", "const", "enum"})


def part_of_limits(schemas: Sequence[Any]) -> float:
    """Return how large rewritten JSON schemas are together, as a part of the largest plain schema.

    Above 1, they are not plain. They may be invalid.
    """
    n_chars = len(json.dumps(schemas)) - len("[]")
    if n_chars > MAX_PLAIN_CHARS:
        return inf
    found: list[Any] = []
    for schema in schemas:
        if not isinstance(schema, dict) or not isinstance(schema.get(_DEFINITIONS, {}), dict):
            return inf
        found.append({name: value for name, value in schema.items() if name != _DEFINITIONS})
        found += schema.get(_DEFINITIONS, {}).values()
    for each in found:  # which gets longer meanwhile
        if len(found) > MAX_PLAIN_SUBSCHEMAS or not (isinstance(each, bool) or _is_plain_level(each)):
            return inf
        found += [] if isinstance(each, bool) else _parts(each)
    n_intersections = sum(map(_has_intersection, found))
    return max(n_chars / MAX_PLAIN_CHARS, len(found) / MAX_PLAIN_SUBSCHEMAS, n_intersections / MAX_PLAIN_INTERSECTIONS)


def _is_plain_level(schema: Any) -> bool:
    """Return whether a value is an object with plain keywords. Those of its parts are not checked."""
    if not isinstance(schema, dict) or not any(schema.keys() <= each for each in _COMBINATIONS):
        return False
    return all(_VALUES[name](value) for name, value in schema.items()) and _are_names_separate(schema)


def _has_intersection(schema: dict[str, Any] | bool) -> bool:
    keywords = frozenset() if isinstance(schema, bool) else schema.keys()
    return any(not each.isdisjoint(keywords) and not others.isdisjoint(keywords) for each, others in _INTERSECTED)


def _are_names_separate(schema: dict[str, Any]) -> bool:
    """Return whether no name of `properties` matches a pattern of `patternProperties`.

    llguidance would intersect the schema of such a property with that of the pattern.
    """
    patterns, names = schema.get("patternProperties", {}), schema.get("properties", {})
    return not names or all(
        _PREFIX.fullmatch(pattern) and not any(name.startswith(pattern[1:]) for name in names) for pattern in patterns
    )


def _parts(schema: dict[str, Any]) -> list[Any]:
    """Return the schemas that stand directly in a schema with plain keywords."""
    alone = [schema[name] for name in ("items", "additionalProperties") if name in schema]
    lists = (schema.get(name, ()) for name in ("allOf", "anyOf", "prefixItems"))
    named = (schema.get(name, {}).values() for name in ("properties", "patternProperties"))
    return [*alone, *chain.from_iterable(lists), *chain.from_iterable(named)]


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -(2**63) <= value < 2**63


def _is_factor(value: Any) -> bool:
    if not _is_number(value) or not 0 < value <= MAX_PLAIN_FACTOR:
        return False
    digits = "".join(map(str, Decimal(str(value)).as_tuple().digits))
    return int(digits) <= MAX_PLAIN_FACTOR


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or _is_number(value)


def _is_type(value: Any) -> bool:
    return all(isinstance(each, str) and each in _TYPES for each in (value if isinstance(value, list) else [value]))


def _is_plain_reference(value: Any) -> bool:
    return isinstance(value, str) and _PLAIN_REFERENCE.fullmatch(value) is not None


def _is_plain_pattern(value: Any) -> bool:
    return isinstance(value, str) and (value in _KNOWN_PATTERNS or not _COSTLY_PATTERN.search(value))


def _is_list_of(is_item: Callable[[Any], bool], n_most: float = inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and 0 < len(value) <= n_most and all(map(is_item, value))


def _is_one_pattern(value: Any) -> bool:
    """Return whether a value of `patternProperties` has no two patterns, which llguidance would compare."""
    return isinstance(value, dict) and len(value) <= 1 and all(map(_is_plain_pattern, value))


_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "$ref": _is_plain_reference,
    "additionalProperties": _is_schema,
    "allOf": _is_list_of(_is_schema, n_most=1),
    "anyOf": _is_list_of(_is_schema),
    "const": _is_scalar,
    "enum": _is_list_of(_is_scalar),
    "format": _is_text,
    "items": _is_schema,
    "multipleOf": _is_factor,
    "pattern": _is_plain_pattern,
    "patternProperties": _is_one_pattern,
    "prefixItems": _is_list_of(_is_schema),
    "properties": lambda value: isinstance(value, dict),
    "required": lambda value: value == [] or _is_list_of(_is_text)(value),
    "type": _is_type,
    **dict.fromkeys(("maxItems", "maxProperties", "minItems", "minProperties"), _is_size(MAX_PLAIN_ITEMS)),
    **dict.fromkeys(("maxLength", "minLength"), _is_size(MAX_PLAIN_LENGTH)),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"), _is_number),
}
"""Tells for each plain keyword whether a value is valid and plain."""
