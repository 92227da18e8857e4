"""Rewrites a JSON schema for llguidance, so that every output matches the schema.

llguidance implements most keywords. Some other keywords can be expressed with these: `dependentRequired`,
`propertyNames`, and `oneOf` whose schemas have no value in common. All remaining keywords are refused; the error names
the place of the keyword and an alternative. A rewritten schema may allow fewer values than the original, but never a
value that the original does not allow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llamaq.common.json_schema.bounds import BOUNDS, rewrite_bounds
from llamaq.common.json_schema.formats import rewrite_format
from llamaq.common.json_schema.object_keywords import rewrite_dependencies, rewrite_property_names, rewrite_sizes
from llamaq.common.json_schema.overlap import MAX_STEPS, Overlaps
from llamaq.common.json_schema.patterns import rewrite_patterns
from llamaq.common.json_schema.references import References, Schema, base_keyword, has_references, refused

SCHEMA_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": r" |\n[ \t]{0,20}",  # without a bound, some models write white space without end
    "json_allowed_escapes": 'nrbtf\\"',  # with `u`, an additional key may be an escaped name of `properties`
}
"""The options of llguidance for a schema. In a schema inside a grammar they are the value of
`x-guidance`."""
MAX_NESTING = 128
"""Upper bound on the levels of objects and arrays in a schema."""
MAX_SCHEMAS = 10_000
"""Upper bound on the schemas in a rewritten schema. Each name in `propertyNames` makes a copy of another schema."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "not": "describe the values that are allowed",
        "if": "use anyOf with one schema for each case",
        "contains": "use prefixItems for the items at fixed places, or items for all of them",
        "uniqueItems": "remove it and check the result, or list the arrays that are allowed with enum",
        "unevaluatedProperties": "use additionalProperties",
        "unevaluatedItems": "use items",
        "propertyNames": "use patternProperties and additionalProperties",
        "$dynamicRef": "use $ref",
        "$recursiveRef": "use $ref",
        "disallow": "describe the values that are allowed",  # the keywords of draft 3
        "divisibleBy": "use multipleOf",
        "extends": "use allOf",
    }
)
"""Maps each keyword that no grammar can enforce to what can be used in its place."""
IMPLEMENTED = frozenset({
    "type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf",
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
    "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format",
})  # fmt: skip
"""The keywords that llguidance implements. All other keywords are removed: they describe a value, but do not constrain
it. In recursive schemas, llguidance does not accept them. `$schema` is removed too: llguidance knows only some of its
values, and would ignore the keywords of later drafts."""
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_WITHOUT_SHORT_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
"""Keywords whose schemas describe the same value as the schema that has them."""
_ONE = ("items", "additionalProperties", "additionalItems")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs")


class NotCompared(Exception):
    """The schemas of a `oneOf` may have a common value. More steps, or properties that exclude each other, may help."""


def rewrite_schema(schema: dict[str, Any], max_steps: int = MAX_STEPS) -> dict[str, Any]:
    """Return a schema for llguidance whose values all match `schema`.

    Args:
        schema: The schema.
        max_steps: Upper bound on the steps to compare the schemas of a `oneOf`, at most `MAX_STEPS`. A step takes 1 to
            4 us.

    Raises:
        NotCompared: `max_steps` is less than `MAX_STEPS`, and the schemas of a `oneOf` may have a common value. If they
            exclude each other's properties, each may become a copy of the target of its reference, which takes longer.
        ValueError: A keyword is not supported. The message names it and its place.
    """
    _check_nesting(schema)
    return _Rewriting(schema, max_steps).run()


def subschemas(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas that stand directly in a schema, without the values `true` and `false`."""
    found = [schema.get(name) for name in _ONE]
    found += [one for name in _SEVERAL for one in _list(schema.get(name))]
    found += [one for name in _NAMED if isinstance(schema.get(name), dict) for one in schema[name].values()]
    return [one for one in found if isinstance(one, dict)]


class _Rewriting:
    """The rewriting of one document. The targets of its references become `$defs`.

    Args:
        root: The whole schema.
        max_steps: Upper bound on the steps to compare the schemas of a `oneOf`.
    """

    def __init__(self, root: dict[str, Any], max_steps: int) -> None:
        self._root = root
        self._references = References(root)
        self._max_steps = max_steps
        self._overlaps = Overlaps(self._references, max_steps)
        text = json.dumps(root)
        self._has_parts = any(f'"{name}"' in text for name in (*_IN_PLACE, "patternProperties"))
        """Whether several schemas may describe the same value."""
        self._has_multiples = self._has_parts and "multipleOf" in text
        self._n_schemas = 0
        self._targets: dict[str, str] = {}
        """Maps each reference that the rewritten schemas contain to its name in `$defs`."""
        self._demanded: dict[str, set[str]] = {}
        """The properties that targets must require, so that the schemas of a `oneOf` have no value in common."""

    def run(self) -> dict[str, Any]:
        rewritten = self._rewrite(self._root, "#")
        definitions: dict[str, Schema] = {}
        while len(definitions) < len(self._targets):  # a target may refer to further ones
            for ref, name in list(self._targets.items())[len(definitions) :]:
                definitions[name] = self._rewrite(self._references.resolve(ref), ref)
        for ref, names in self._demanded.items():
            name = self._targets[ref]
            definitions[name] = _requiring(definitions[name], names)
        return {**rewritten, "$defs": definitions} if definitions else dict(rewritten)

    def _rewrite(self, schema: Schema, place: str) -> Schema:
        """Return a schema and all schemas in it rewritten."""
        self._n_schemas += 1
        if self._n_schemas > MAX_SCHEMAS:
            raise ValueError(f"it has more than {MAX_SCHEMAS} schemas; each name in propertyNames makes a copy of one")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _no_schema(place)
        base = base_keyword(schema)
        if base is not None and place != "#" and has_references(schema):
            raise refused(base, place, "is not supported where its schema has references: remove it")
        if isinstance(schema.get("required"), bool):
            raise refused("required", place, "is not supported inside a property: list its name in the object")
        schema = self._simplify(schema, place)
        for keyword, way_out in REFUSED.items():
            if keyword in schema:
                raise refused(keyword, place, f"is not supported: {way_out}")
        _check_values(schema, place)
        if "oneOf" in schema:
            schema = self._rewrite_one_of(schema, place)
        if "$ref" in schema:
            schema = {**schema, "$ref": self._rewrite_ref(schema["$ref"], place)}
        return self._rewrite_parts({name: value for name, value in schema.items() if name in IMPLEMENTED}, place)

    def _simplify(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Return a schema with some keywords expressed by others."""
        if schema.keys().isdisjoint(_IN_PLACE):
            schema = _renamed(schema, "unevaluatedProperties", "additionalProperties")
            items = "additionalItems" if isinstance(schema.get("items"), list) else "items"
            schema = _renamed(schema, "unevaluatedItems", items)
        schema = _with_whole_sizes(schema)
        if "additionalItems" in schema and not isinstance(schema.get("items"), list):
            schema = _without(schema, "additionalItems")  # llguidance would read `items` alone, without `prefixItems`
        if "prefixItems" in schema and isinstance(schema.get("items"), list):
            raise refused("prefixItems", place, "is not supported beside a list of items: leave one of them out")
        schema = rewrite_format(schema)
        schema = rewrite_dependencies(schema)
        schema = rewrite_property_names(schema, self._references)
        schema = rewrite_patterns(schema, place)
        schema = rewrite_sizes(schema, place)
        if not schema.keys().isdisjoint(BOUNDS):
            schema = rewrite_bounds(schema, place, is_part=self._has_parts)
        if schema.get("uniqueItems") is False or _is_at_most_one(schema.get("maxItems")):
            schema = _without(schema, "uniqueItems")
        if self._has_multiples and self._overlaps.have_large_multiple([schema]):
            raise refused("multipleOf", place, "is too large in several schemas: merge them")
        return schema

    def _rewrite_parts(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        result = dict(schema)
        for name in _ONE:
            if isinstance(schema.get(name), dict):
                result[name] = self._rewrite(schema[name], f"{place}/{name}")
        for name in _SEVERAL:
            if isinstance(schema.get(name), list):
                result[name] = [self._rewrite(one, f"{place}/{name}/{n}") for n, one in enumerate(schema[name])]
        for name in _NAMED:
            if isinstance(schema.get(name), dict):
                result[name] = {key: self._rewrite(one, f"{place}/{name}/{key}") for key, one in schema[name].items()}
        return result

    def _rewrite_one_of(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Return a schema with `anyOf` in place of `oneOf`, if no two of the schemas have a value in common."""
        branches, rest = schema["oneOf"], _without(schema, "oneOf")
        if not isinstance(branches, list):
            return schema
        overlap = self._overlap(branches, rest)
        if overlap is not None:
            separate = self._with_discriminator(branches, rest)
            if separate is None and self._max_steps < MAX_STEPS:
                raise NotCompared(f"`oneOf` at {place}")
            branches = separate or self._excluding_each_other(branches, rest)
            if branches is None:
                message = (
                    f"is not supported where its schemas {overlap[0]} and {overlap[1]} may match the same value: use "
                    "anyOf, or give each of them a required property with a different const"
                )
                raise refused("oneOf", place, message)
        if "anyOf" in rest:
            return {**rest, "allOf": [*_list(rest.get("allOf")), {"anyOf": branches}]}
        return {**rest, "anyOf": branches}

    def _overlap(self, branches: Sequence[Schema], rest: dict[str, Any]) -> tuple[int, int] | None:
        """Return the places of two schemas that may match the same value, or None."""
        return next(self._overlapping_pairs(branches, rest), None)

    def _overlapping_pairs(self, branches: Sequence[Schema], rest: dict[str, Any]) -> Iterator[tuple[int, int]]:
        """Yield the places of any two schemas that may match the same value."""
        for place, branch in enumerate(branches):
            for earlier in range(place):
                if not self._overlaps.are_disjoint([rest, branches[earlier]], [rest, branch]):
                    yield earlier, place

    def _with_discriminator(self, branches: list[Schema], rest: dict[str, Any]) -> list[Schema] | None:
        """Return the schemas, which require a property whose value differs in each. None: there is no such property.

        pydantic does not require the discriminator of a union if it has a default. If a schema is a reference,
        `required` is added to its target, because llguidance does not allow keywords beside a reference in a recursive
        schema.
        """
        for name in self._overlaps.discriminators(branches):
            if self._overlap(branches, {**rest, "required": [*_list(rest.get("required")), name]}) is not None:
                continue
            for branch in branches:
                if _is_target(branch):
                    self._demanded.setdefault(branch["$ref"], set()).add(name)
            return [branch if _is_target(branch) else _requiring(branch, {name}) for branch in branches]
        return None

    def _excluding_each_other(self, branches: list[Schema], rest: dict[str, Any]) -> list[Schema] | None:
        """Return the schemas, each without the properties that overlapping ones require. None: there are none.

        A value of the first of two such schemas has a property that the second one excludes, and the other way round.
        So it matches only one of the original schemas.
        """
        excluded: list[set[str]] = [set() for _ in branches]
        for one, other in self._overlapping_pairs(branches, rest):
            names = self._overlaps.required_by_one([rest, branches[one]], [rest, branches[other]])
            if names is None:
                return None
            excluded[other].add(names[0])
            excluded[one].add(names[1])
        return [_without_properties(branch, names) for branch, names in zip(branches, excluded, strict=True)]

    def _rewrite_ref(self, ref: Any, place: str) -> str:
        """Return the reference to a target as a member of `$defs`."""
        if ref == "#":
            return "#"
        if not isinstance(self._references.resolve(ref), dict | bool):
            raise refused("$ref", place, f"points to {ref!r}, which is not in the schema: copy it into $defs")
        return f"#/$defs/{self._targets.setdefault(ref, str(len(self._targets)))}"


def _without_properties(schema: Schema, names: set[str]) -> Schema:
    """Return a schema whose objects do not have the named properties."""
    if not names:
        return schema
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {**schema, "properties": known | dict.fromkeys(sorted(names), False)}


def _is_target(schema: Schema) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"] != "#"


def _is_at_most_one(value: Any) -> bool:
    return isinstance(value, int) and value <= 1


def _requiring(schema: Schema, names: Iterable[str]) -> Schema:
    required = _list(schema.get("required"))
    return {**schema, "required": [*required, *(name for name in sorted(names) if name not in required)]}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _without(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != name}


def _renamed(schema: dict[str, Any], name: str, other: str) -> dict[str, Any]:
    """Return a schema with a keyword renamed, or without it if the schema also has the new name."""
    if name not in schema:
        return schema
    return {other: schema[name], **_without(schema, name)}


def _no_schema(place: str) -> ValueError:
    return ValueError(f"the schema at {place} is neither an object nor a boolean")


def _with_whole_sizes(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with sizes such as 2 in place of 2.0, which llguidance does not accept."""
    sizes = {name: schema[name] for name in _SIZES if isinstance(schema.get(name), float)}
    return schema | {name: int(size) for name, size in sizes.items() if size.is_integer()}


def _check_values(schema: dict[str, Any], place: str) -> None:
    """Refuse values with a number that llguidance rounds, or with a control character that has no short escape."""
    for keyword in {"const", "enum"} & schema.keys():
        for value in _scalars(schema[keyword]):
            if isinstance(value, str):
                if found := _WITHOUT_SHORT_ESCAPE.search(value):
                    raise refused(keyword, place, f"has the character U+{ord(found[0]):04X}, which no output has")
            elif value is not None and not (abs(value) < 2**63 and min(float(value), 2**63 - 1) == value):
                raise refused(keyword, place, f"has the number {value!s:.30}, which would be rounded: use a string")


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the values in a value that are neither objects nor arrays."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _scalars(part)
    else:
        yield value


def _check_nesting(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        level = [
            part
            for one in level
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it nests deeper than {MAX_NESTING} levels")
