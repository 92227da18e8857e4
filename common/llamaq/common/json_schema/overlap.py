"""Decides whether two JSON schemas can describe the same value, which `oneOf` does not allow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, nextafter, prod
from typing import Any

from llamaq.common.json_schema.bounds import with_numbers
from llamaq.common.json_schema.references import References, Schema

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
MAX_DEPTH = 8
"""Schemas below this level are taken to overlap."""
MAX_STEPS = 200_000
"""Upper bound on the steps for one document, which take about 0.2 s. All further schemas are assumed to overlap. Each
keyword, name and value that is read is a step."""
STEPS_TO_COMPARE = 3
"""A comparison of two schemas takes this number of steps, in addition to those for their names and values."""
STEPS_FOR_VALUE = 3
"""To write a value of an `enum` as JSON takes as long as this number of further steps."""
_LARGEST = 1e300
"""Larger bounds are ignored."""
ALTERNATIVES = ("anyOf", "oneOf")
_SIZES = (
    ("number", "minimum", "maximum"),
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
)


@dataclass(slots=True)
class _Shape:
    """The values that match all of several schemas."""

    types: set[str] = field(default_factory=lambda: set(TYPES))
    values: set[str] | None = None
    """The values that `const` and `enum` allow, as JSON."""
    least: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    """Bounds of numbers and sizes by type."""
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Schema]] = field(default_factory=dict)
    closed: list[set[str]] = field(default_factory=list)
    """The names that each `additionalProperties: false` allows."""
    multiples: list[float] = field(default_factory=list)
    prefix: dict[int, list[Schema]] = field(default_factory=dict)
    items: list[Schema] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Described:
    """What several schemas require together."""

    schemas: tuple[Schema, ...]
    conjuncts: Sequence[Schema]
    """The schemas without `$ref` and `allOf`, which their targets and parts replace."""
    shape: _Shape
    alternatives: Sequence[Sequence[Schema]]
    """The schemas of each `anyOf` and `oneOf` of the conjuncts."""
    rest: Sequence[Schema]
    """The other keywords of the conjuncts, if there are alternatives."""


class Overlaps:
    """Compares the schemas of one document.

    Args:
        references: The definitions of the document.
        max_steps: Upper bound on the steps, at most `MAX_STEPS`.
    """

    def __init__(self, references: References, max_steps: int = MAX_STEPS) -> None:
        self._references = references
        self._max_steps = max_steps
        self._n_steps = 0
        self._multiplied: set[tuple[int, ...]] = set()
        """The arguments of `have_large_multiple` so far."""
        self._described: dict[tuple[int, ...], _Described] = {}
        """By the identities of the schemas, which the values keep alive. Each schema of a `oneOf` is compared with all
        others."""

    @property
    def is_exhausted(self) -> bool:
        """Whether there were more than `max_steps` steps, so that further schemas are not compared."""
        return self._n_steps > self._max_steps

    def are_disjoint(self, one: Sequence[Schema], other: Sequence[Schema], depth: int = 0) -> bool:
        """Return whether no value matches all schemas of `one` and all schemas of `other`. False: this is not known."""
        if depth > MAX_DEPTH or self.is_exhausted:
            return False
        first, second = self._describe(one), self._describe(other)
        self._n_steps += STEPS_TO_COMPARE + _n_compared(first, second) + _n_compared(second, first)
        if _are_disjoint_values(first.shape, second.shape):
            return True
        if self._have_disjoint_parts(first.shape, second.shape, depth):
            return True
        return self._have_disjoint_alternatives(first, second, depth) or self._have_disjoint_alternatives(
            second, first, depth
        )

    def discriminators(self, branches: Sequence[Schema]) -> Iterator[str]:
        """Yield the properties whose values differ between any two of the branches."""
        shapes: list[_Shape] = []
        for branch in branches:
            if self.is_exhausted:
                return
            shapes.append(self._describe([branch]).shape)
        for name in shapes[0].properties if shapes else ():
            self._n_steps += len(shapes)
            if self.is_exhausted or not all(name in shape.properties for shape in shapes):
                continue
            schemas = [shape.properties[name] for shape in shapes]
            pairs = ((one, two) for index, one in enumerate(schemas) for two in schemas[:index])
            if all(self.are_disjoint(one, two, 1) for one, two in pairs):
                yield name

    def required_by_one(self, one: Sequence[Schema], other: Sequence[Schema]) -> tuple[str, str] | None:
        """Return a property that only the schemas of `one` require, and one that only those of `other` require.

        None: there are no such properties, or a value that is no object may match all schemas.
        """
        if self.is_exhausted:
            return None
        first, second = self._describe(one), self._describe(other)
        self._n_steps += STEPS_TO_COMPARE + _n_compared(first, second) + _n_compared(second, first)
        if not first.shape.types & second.shape.types <= {"object"}:
            return None
        mine, others = _required_alone(first.shape, second.shape), _required_alone(second.shape, first.shape)
        return None if mine is None or others is None else (mine, others)

    def have_large_multiple(self, schemas: Sequence[Schema], depth: int = 0) -> bool:
        """Return whether `multipleOf` of one value have a product of more than 32 bits. False: this may be unknown."""
        key = tuple(map(id, schemas))
        if depth > MAX_DEPTH or self.is_exhausted or key in self._multiplied:
            return False
        self._multiplied.add(key)
        shape = self._describe(schemas).shape
        multiples = shape.multiples
        self._n_steps += STEPS_TO_COMPARE + len(multiples)
        while any(one % 1 > 0 for one in multiples):
            multiples = [10 * one for one in multiples]  # as llguidance does
        return (len(multiples) > 1 and prod(multiples) >= 2**32) or any(
            len(part) > 1 and self.have_large_multiple(part, depth + 1) for part in shape.properties.values()
        )

    def _have_disjoint_alternatives(self, one: _Described, other: _Described, depth: int) -> bool:
        """Return whether `one` has an `anyOf` whose schemas are all disjoint from `other`."""
        return any(
            all(self.are_disjoint([*one.rest, schema], other.conjuncts, depth + 1) for schema in alternatives)
            for alternatives in one.alternatives
        )

    def _have_disjoint_parts(self, one: _Shape, other: _Shape, depth: int) -> bool:
        if one.types == other.types == {"object"}:
            return self._have_disjoint_objects(one, other, depth) or self._have_disjoint_objects(other, one, depth)
        if one.types == other.types == {"array"}:
            n_common = int(min(max(one.least.get("array", 0), other.least.get("array", 0)), MAX_DEPTH))
            return any(
                self.are_disjoint(_item(one, index), _item(other, index), depth + 1) for index in range(n_common)
            )
        return False

    def _have_disjoint_objects(self, one: _Shape, other: _Shape, depth: int) -> bool:
        """Return whether a property that `one` requires has no value that `other` allows."""
        return any(
            any(name not in names for names in other.closed)
            or (
                name in other.properties
                and self.are_disjoint(one.properties.get(name, [True]), other.properties[name], depth + 1)
                and (name in other.required or False in other.properties[name])
            )
            for name in one.required
        )

    def _describe(self, schemas: Sequence[Schema]) -> _Described:
        key = tuple(map(id, schemas))
        described = self._described.get(key)
        if described is None:
            conjuncts = self._conjuncts(schemas)
            alternatives = _alternatives(conjuncts)
            rest = _without_alternatives(conjuncts) if alternatives else ()
            described = _Described(tuple(schemas), conjuncts, _shape(conjuncts), alternatives, rest)
            self._described[key] = described
        return described

    def _conjuncts(self, schemas: Sequence[Schema]) -> list[Schema]:
        """Return the schemas, the targets of their references and the schemas of their `allOf`, in one list."""
        found: list[Schema] = []
        waiting, refs = list(schemas), set()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict):
                found.append(schema)
                continue
            self._n_steps += 3 + sum(len(value) if isinstance(value, dict | list) else 1 for value in schema.values())
            if isinstance(schema.get("enum"), list):
                self._n_steps += STEPS_FOR_VALUE * len(schema["enum"])
            ref = schema.get("$ref")
            if ref is not None and self._references.refs_stand_alone:
                # Other keywords must not tell schemas apart, although they apply to the output.
                schema = {"$ref": ref, "multipleOf": schema.get("multipleOf")}
            found.append({name: value for name, value in schema.items() if name not in ("$ref", "allOf")})
            if isinstance(schema.get("allOf"), list):
                waiting += schema["allOf"]
            if isinstance(ref, str) and ref not in refs:
                refs.add(ref)
                waiting.append(self._references.resolve(ref))
        return found


def _shape(schemas: Sequence[Schema]) -> _Shape:
    """Return what several schemas, which have neither `$ref` nor `allOf`, require together."""
    shape = _Shape()
    for schema in schemas:
        if schema is False:
            shape.types.clear()
        elif isinstance(schema, dict):
            _add_values(shape, schema)
            _add_sizes(shape, schema)
            _add_object(shape, schema)
            _add_array(shape, schema)
    return shape


def _required_alone(one: _Shape, other: _Shape) -> str | None:
    """Return a property that only `one` requires, if possible one that `other` does not have at all."""
    names = sorted(one.required - other.required, key=lambda name: (name in other.properties, name))
    return names[0] if names else None


def _alternatives(conjuncts: Sequence[Schema]) -> list[list[Schema]]:
    return [
        schema[name]
        for schema in conjuncts
        for name in ALTERNATIVES
        if isinstance(schema, dict) and isinstance(schema.get(name), list)
    ]


def _without_alternatives(conjuncts: Sequence[Schema]) -> list[Schema]:
    return [
        {name: value for name, value in schema.items() if name not in ALTERNATIVES}
        if isinstance(schema, dict)
        else schema
        for schema in conjuncts
    ]


def _n_compared(one: _Described, other: _Described) -> int:
    """Return the number of values and names of `one` that are looked up in `other`, and of its conjuncts."""
    values, required = one.shape.values or (), one.shape.required
    return len(one.schemas) + len(one.conjuncts) + len(values) + len(required) * (1 + len(other.shape.closed))


def _are_disjoint_values(one: _Shape, other: _Shape) -> bool:
    if one.values is not None and other.values is not None and not one.values & other.values:
        return True
    return all(_are_disjoint_sizes(one, other, kind) for kind in one.types & other.types)


def _are_disjoint_sizes(one: _Shape, other: _Shape, kind: str) -> bool:
    name = "number" if kind == "integer" else kind
    least = max(one.least.get(name, -inf), other.least.get(name, -inf))
    return least > min(one.most.get(name, inf), other.most.get(name, inf))


def _add_values(shape: _Shape, schema: dict[str, Any]) -> None:
    types = schema.get("type")
    if isinstance(types, str | list):
        names = {types} if isinstance(types, str) else {name for name in types if isinstance(name, str)}
        shape.types &= names | ({"integer"} if "number" in names else set())
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        values = [schema["const"]]
    if "const" in schema or "enum" in schema:
        shape.types &= {_type_of(value) for value in values}
        texts = {_as_text(value) for value in values}
        shape.values = texts if shape.values is None else shape.values & texts


def _add_sizes(shape: _Shape, schema: dict[str, Any]) -> None:
    schema = with_numbers(schema)
    if _is_number(schema.get("multipleOf")):
        shape.multiples.append(float(schema["multipleOf"]))
    for name, least, most in _SIZES:
        if _is_number(schema.get(least)):
            shape.least[name] = max(shape.least.get(name, -inf), schema[least])
        if _is_number(schema.get(most)):
            shape.most[name] = min(shape.most.get(name, inf), schema[most])
    if _is_number(schema.get("exclusiveMinimum")):
        shape.least["number"] = max(shape.least.get("number", -inf), nextafter(schema["exclusiveMinimum"], inf))
    if _is_number(schema.get("exclusiveMaximum")):
        shape.most["number"] = min(shape.most.get("number", inf), nextafter(schema["exclusiveMaximum"], -inf))


def _add_object(shape: _Shape, schema: dict[str, Any]) -> None:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    for name, value in properties.items():
        shape.properties.setdefault(name, []).append(value)
    if isinstance(schema.get("required"), list):
        shape.required |= {name for name in schema["required"] if isinstance(name, str)}
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        shape.closed.append(set(properties))


def _add_array(shape: _Shape, schema: dict[str, Any]) -> None:
    prefix = schema.get("prefixItems")
    prefix = prefix if isinstance(prefix, list) else []
    for index, value in enumerate(prefix):
        shape.prefix.setdefault(index, []).append(value)
    if not prefix and isinstance(schema.get("items"), dict | bool):
        shape.items.append(schema["items"])


def _item(shape: _Shape, index: int) -> list[Schema]:
    return [*shape.prefix.get(index, []), *shape.items]


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _as_text(value: Any) -> str:
    """Return a value as JSON. Numbers that are equal have the same text."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_integers(one) for one in value]
        case dict():
            return {name: _with_integers(one) for name, one in value.items()}
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
