from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from llamaq.common.json_schema.overlap import Overlaps
from llamaq.common.json_schema.patterns import narrowed
from llamaq.common.json_schema.references import References
from llamaq.common.json_schema.rewriting import rewrite_schema

INTEGER: dict[str, Any] = {"type": "integer"}
A_AND_B: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}


class Leaf(BaseModel):
    kind: Literal["leaf"] = "leaf"
    value: int


class Pair(BaseModel):
    kind: Literal["pair"] = "pair"
    left: Node
    right: Node


Node = Annotated[Leaf | Pair, Field(discriminator="kind")]
Pair.model_rebuild()

EXACT: dict[str, Any] = {
    "enum": [2**53, -(2**53), 2**62, 2**63 - 1, [10**18, {"a": 1e18}], 0.1, 1e-7, -2.5, True, None]
}
MULTIPLES: dict[str, Any] = {"allOf": [{"multipleOf": 0.01}, {"multipleOf": 0.01}, {"multipleOf": 100_000}]}
DAYS: dict[str, Any] = {**INTEGER, "multipleOf": 86_400}
PERIODS: dict[str, Any] = {
    "allOf": [{"properties": {"a": DAYS}}, {"properties": {"b": DAYS}, "anyOf": [{"items": DAYS}, {"items": DAYS}]}]
}
POINTER = {"pattern": r"^(0|[1-9][0-9]{0,8})(#|(/([[^~/]&&[^\x00]]|~[01])*)*)$"}
REWRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "descriptions are left out": ({**INTEGER, "title": "T", "x-order": 1, "nullable": True}, INTEGER),
    "options of llguidance are left out": ({**INTEGER, "x-guidance": {"lenient": True}}, INTEGER),
    "the draft is left out": ({**INTEGER, "$schema": "https://json-schema.org/draft-04/schema"}, INTEGER),
    "unused definitions are left out": ({**INTEGER, "$defs": {"a": {"not": {}}}}, INTEGER),
    "values are not schemas": ({"enum": [{"not": 1, "$ref": 2}]}, {"enum": [{"not": 1, "$ref": 2}]}),
    "a property may be named as a keyword": (
        {"properties": {"not": INTEGER, "$ref": INTEGER}},
        {"properties": {"not": INTEGER, "$ref": INTEGER}},
    ),
    "targets of references become definitions": (
        {"properties": {"a": {"$ref": "#/parts/A~1%25"}, "b": {"$ref": "#/properties/a"}}, "parts": {"A/%": INTEGER}},
        {
            "properties": {"a": {"$ref": "#/$defs/0"}, "b": {"$ref": "#/$defs/1"}},
            "$defs": {"0": INTEGER, "1": {"$ref": "#/$defs/0"}},
        },
    ),
    "an anchor is a target": (
        {"$id": "https://a.com/s", "$ref": "https://a.com/s#x", "$defs": {"a": {"$anchor": "x", **INTEGER}}},
        {"$ref": "#/$defs/0", "$defs": {"0": INTEGER}},
    ),
    "the name of a schema in draft 7 is a target": (
        {"$ref": "#x", "definitions": {"a": {"$id": "#x", **INTEGER}, "b": {"$id": "#/definitions/a", "type": "null"}}},
        {"$ref": "#/$defs/0", "$defs": {"0": INTEGER}},
    ),
    "an anchor inside a value or below another base is no target": (
        {
            "$ref": "#x",
            "$defs": {
                "a": {"$anchor": "x", **INTEGER},
                "b": {"enum": [{"$anchor": "x"}], "default": {"$anchor": "x"}},
                "c": {"$id": "https://b.com", "items": {"$anchor": "x", "type": "null"}},
            },
        },
        {"$ref": "#/$defs/0", "$defs": {"0": INTEGER}},
    ),
    "a reference to the root stays": ({"items": {"$ref": "#"}}, {"items": {"$ref": "#"}}),
    "an unknown format does not constrain": ({"type": "string", "format": "password"}, {"type": "string"}),
    "a format becomes a narrower one": ({"format": "iri"}, {"format": "uri"}),
    "a format becomes a pattern": ({"format": "relative-json-pointer"}, POINTER),
    "a format of draft 3 has a new name": ({"format": "ip-address"}, {"format": "ipv4"}),
    "a size may be written as a fraction": ({"maxLength": 2.0, "minItems": 1.0}, {"maxLength": 2, "minItems": 1}),
    "one item is unique": ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
    "items that may be equal": ({"uniqueItems": False, "maxItems": 3}, {"maxItems": 3}),
    "unevaluated properties are additional ones": (
        {**A_AND_B, "unevaluatedProperties": False},
        {**A_AND_B, "additionalProperties": False},
    ),
    "unevaluated items after a list of items are additional ones": (
        {"items": [INTEGER], "unevaluatedItems": False},
        {"items": [INTEGER], "additionalItems": False},
    ),
    "additional items need a list of items": (
        {"prefixItems": [INTEGER], "additionalItems": False},
        {"prefixItems": [INTEGER]},
    ),
    "unevaluated properties have the names that are allowed": (
        {"propertyNames": {"enum": ["a"]}, "unevaluatedProperties": INTEGER},
        {"properties": {"a": INTEGER}, "additionalProperties": False},
    ),
    "a property that needs another one evaluates none": (
        {"dependentRequired": {"a": ["b"]}, "unevaluatedProperties": INTEGER},
        {
            "additionalProperties": INTEGER,
            "allOf": [{"anyOf": [{"properties": {"a": False}}, {"required": ["a", "b"]}]}],
        },
    ),
    "names from an enum": (
        {"propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": INTEGER, "$defs": {"n": {"enum": ["a", "b"]}}},
        {"properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False},
    ),
    "names from an enum with a title beside it": (
        {"propertyNames": {"$ref": "#/$defs/n", "title": "N", "type": "string"}, "$defs": {"n": {"enum": ["a"]}}},
        {"properties": {"a": {}}, "additionalProperties": False},
    ),
    "names of draft 7 without the keywords beside a reference": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "propertyNames": {"$ref": "#/definitions/n", "maxLength": 1},
            "definitions": {"n": {"pattern": "^a"}},
        },
        {"patternProperties": {"^a": {}}, "additionalProperties": False},
    ),
    "names whose length is written as a fraction": (
        {"propertyNames": {"minLength": 1.0, "maxLength": 5.0}},
        {"patternProperties": {"^[[^\\x00-\\x1f]&&[^\\x00]]{1,5}$": {}}, "additionalProperties": False},
    ),
    "names with a pattern": (
        {"propertyNames": {"pattern": "^a"}, "additionalProperties": INTEGER},
        {"patternProperties": {"^a": INTEGER}, "additionalProperties": False},
    ),
    "a property that needs another one": (
        {**A_AND_B, "dependentRequired": {"a": ["b"]}},
        {**A_AND_B, "allOf": [{"anyOf": [{"properties": {"a": False}}, {"required": ["a", "b"]}]}]},
    ),
    "a property that needs a schema": (
        {**A_AND_B, "dependencies": {"a": {"title": "T", "required": ["b"]}}},
        {
            **A_AND_B,
            "allOf": [{"anyOf": [{"properties": {"a": False}}, {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}]}],
        },
    ),
    "oneOf of different types": (
        {"oneOf": [INTEGER, {"type": "string"}]},
        {"anyOf": [INTEGER, {"type": "string"}]},
    ),
    "oneOf of ranges in draft 4": (
        {"oneOf": [{**INTEGER, "maximum": 5, "exclusiveMaximum": True}, {**INTEGER, "minimum": 5}]},
        {"anyOf": [{**INTEGER, "exclusiveMaximum": 5}, {**INTEGER, "minimum": 5}]},
    ),
    "values that are exact": (EXACT, EXACT),
    "multiples with a small product": (MULTIPLES, MULTIPLES),
    "large multiples of different values": (PERIODS, PERIODS),
    "bounds of 64 bits": (
        {**INTEGER, "minimum": -(2**63), "exclusiveMaximum": 2**63},
        {**INTEGER, "minimum": -(10**18), "maximum": 10**18},
    ),
    "exclusive bounds of draft 4": (
        {"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5, "exclusiveMaximum": False},
        {"minimum": 1e-9, "maximum": 0.5},
    ),
    "large exclusive bounds of draft 4": (
        {**INTEGER, "minimum": -(2**59), "exclusiveMinimum": True},
        {**INTEGER, "minimum": -(2**59) + 64},
    ),
    "large bounds that are exact stay": ({"minimum": -(2**59), "maximum": 5.5}, {"minimum": -(2**59), "maximum": 5.5}),
    "an exclusive bound of a small interval": (
        {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        {"exclusiveMaximum": 0.5, "minimum": 1e-9},
    ),
    "a range without numbers stays": (
        {"exclusiveMinimum": 0, "maximum": -0.5},
        {"exclusiveMinimum": 0, "maximum": -0.5},
    ),
    "other exclusive bounds stay": ({"exclusiveMinimum": 0, "maximum": 1}, {"exclusiveMinimum": 0, "maximum": 1}),
    "oneOf beside anyOf": (
        {"anyOf": [{"minimum": 1}], "oneOf": [INTEGER, {"type": "string"}]},
        {"anyOf": [{"minimum": 1}], "allOf": [{"anyOf": [INTEGER, {"type": "string"}]}]},
    ),
    "oneOf of required properties": (
        {**A_AND_B, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {
            **A_AND_B,
            "anyOf": [
                {"required": ["a"], "properties": {"b": False}},
                {"required": ["b"], "properties": {"a": False}},
            ],
        },
    ),
    "oneOf of objects that require different properties": (
        {
            "type": "object",
            "oneOf": [
                {"title": "A", "required": ["a"], "properties": {"a": INTEGER}},
                {"required": ["b", "c"], "properties": {"a": {}, "b": INTEGER}},
                {"type": "null"},
            ],
        },
        {
            "type": "object",
            "anyOf": [
                {"required": ["a"], "properties": {"a": INTEGER, "b": False}},
                {"required": ["b", "c"], "properties": {"a": False, "b": INTEGER}},
                {"type": "null"},
            ],
        },
    ),
    "at least one of several properties": (
        {**A_AND_B, "minProperties": 1},
        {**A_AND_B, "allOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}]},
    ),
    "exactly one of several properties": (
        {**A_AND_B, "minProperties": 1, "maxProperties": 1},
        {
            **A_AND_B,
            "allOf": [
                {
                    "anyOf": [
                        {"properties": {"a": True, "b": False}, "required": ["a"], "additionalProperties": False},
                        {"properties": {"b": True, "a": False}, "required": ["b"], "additionalProperties": False},
                    ]
                }
            ],
        },
    ),
    "no further property": (
        {**A_AND_B, "required": ["a"], "maxProperties": 1},
        {
            **A_AND_B,
            "required": ["a"],
            "allOf": [
                {
                    "anyOf": [
                        {"properties": {"a": True, "b": False}, "required": [], "additionalProperties": False},
                    ]
                }
            ],
        },
    ),
    "all properties": (
        {**A_AND_B, "additionalProperties": False, "minProperties": 2, "maxProperties": 2},
        {**A_AND_B, "additionalProperties": False, "allOf": [{"anyOf": [{"required": ["a", "b"]}]}]},
    ),
    "as many properties as there are": (
        {**A_AND_B, "additionalProperties": False, "minProperties": 0, "maxProperties": 2},
        {**A_AND_B, "additionalProperties": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), REWRITTEN.values(), ids=REWRITTEN)
def test_a_schema_is_written_with_the_keywords_of_llguidance(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert rewrite_schema(schema) == expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ('^[^"]*$', r'^[[^"]&&[^\x00]]*$'),
        (r"[]\]a[^b]][^]]", r"[[]\]a[^b]]&&[^\x00]][[^]]&&[^\x00]]"),
        (
            r"\[a\]\PL\p{Cc}\x{0}\u0000\x01",
            r"\[a\][\PL&&[^\x00]][\p{Cc}&&[^\x00]][\x{0}&&[^\x00]][\u0000&&[^\x00]]\x01",
        ),
        (r"\s[\s-]\S", r"[\s&&[^\x85]][[[\s&&[^\x85]]-]&&[^\x00]][\S&&[^\x{FEFF}]]"),
        (r"[^\s]", r"[[^[\s\x{FEFF}]]&&[^\x00]]"),
        (r"\(?!\\b[(?!]", r"\(?!\\b[(?!]"),
        ("[a", "[a"),
    ],
)
def test_no_set_of_characters_of_a_pattern_has_the_character_nul(pattern: str, expected: str) -> None:
    assert narrowed(pattern) == expected
    assert rewrite_schema({"patternProperties": {pattern: True}}) == {"patternProperties": {expected: True}}


def test_a_discriminator_with_a_default_is_required_in_each_model() -> None:
    rewritten = rewrite_schema(TypeAdapter(Node).json_schema())
    assert [one["required"] for one in rewritten["$defs"].values()] == [["value", "kind"], ["left", "right", "kind"]]
    assert "oneOf" not in json.dumps(rewritten)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "place": ({"properties": {"a": {"items": {"not": {}}}}}, "`not` at #/properties/a/items is not supported"),
    "place in a definition": ({"$ref": "#/$defs/a", "$defs": {"a": {"if": {}}}}, "`if` at #/\\$defs/a"),
    "way out": ({"uniqueItems": True}, "remove it and check the result"),
    "contains": ({"contains": {}}, "`contains`"),
    "dynamic": ({"$dynamicRef": "#a"}, "use \\$ref"),
    "unevaluated": ({"allOf": [A_AND_B], "unevaluatedProperties": False}, "use additionalProperties"),
    "names": ({**A_AND_B, "propertyNames": {"pattern": "^a"}}, "use patternProperties"),
    "names with two limits": ({"propertyNames": {"enum": ["a", "bb"], "maxLength": 1}}, "use patternProperties"),
    "names that are no texts": ({"propertyNames": {"type": "integer"}}, "use patternProperties"),
    "length of names beside a reference": (
        {"propertyNames": {"$ref": "#/$defs/n", "maxLength": 3}, "$defs": {"n": {"pattern": "^a"}}},
        "`propertyNames` at # is not supported: use patternProperties",
    ),
    "type of names beside a reference": (
        {"propertyNames": {"$ref": "#/$defs/n", "type": "integer"}, "$defs": {"n": {"pattern": "^a"}}},
        "use patternProperties",
    ),
    "no whole length of names": ({"propertyNames": {"maxLength": 2.5}}, "use patternProperties"),
    "integer that is rounded": (
        {"items": {"const": 2**53 + 1}},
        "`const` at #/items has the number 9007199254740993, which would be rounded: use a string",
    ),
    "integer inside a value": (
        {"enum": [1, [{"a": 175928847299117063}]]},
        "`enum` at # has the number 175928847299117063",
    ),
    "negative integer": ({"const": -(2**53) - 1}, "has the number -9007199254740993,"),
    "smallest integer of 64 bits": ({"const": -(2**63)}, "has the number -9223372036854775808,"),
    "integer of more than 64 bits": ({"enum": [10**20]}, "has the number 100000000000000000000,"),
    "integer of very many digits": ({"const": 10**400}, "has the number 100000000000000000000000000000,"),
    "large fraction": ({"const": -1e20}, "has the number -1e\\+20,"),
    "number that is too large": ({"const": float("1e400")}, "has the number inf,"),
    "equal large multiples": ({"allOf": [DAYS, DAYS]}, "`multipleOf` at # is too large in several schemas: merge them"),
    "large multiple beside a reference": (
        {"items": {"$ref": "#/$defs/a", "multipleOf": 70_000}, "$defs": {"a": {"allOf": [DAYS]}}},
        "`multipleOf` at #/items is too large",
    ),
    "large multiple beside a reference of draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/a",
            "multipleOf": 70_000,
            "definitions": {"a": DAYS},
        },
        "`multipleOf` at # is too large",
    ),
    "large multiples of a property": (
        {
            "allOf": [
                {"properties": {"a": {"properties": {"b": DAYS}}}},
                {"properties": {"a": {"properties": {"b": DAYS}}}},
            ]
        },
        "`multipleOf` at # is too large",
    ),
    "multiples with many digits": ({"allOf": [{"multipleOf": 1e-7}, {"multipleOf": 1000}]}, "`multipleOf` at #"),
    "keys that may be equal": ({"required": ["a"], "minProperties": 3}, "above 2, because a key may occur twice"),
    "beyond all digits": ({"minimum": 10**400}, "`minimum` at # is not supported beyond 9000000000000000000"),
    "no number between": ({"exclusiveMinimum": 0, "maximum": 1e-10}, "`exclusiveMinimum` at # is not supported where"),
    "draft 3, disallow": ({"disallow": "string"}, "`disallow` at # is not supported"),
    "draft 3, divisibleBy": ({"divisibleBy": 2}, "use multipleOf"),
    "draft 3, extends": ({"extends": {"maximum": 3}}, "use allOf"),
    "draft 3, required": ({"properties": {"a": {"required": True}}}, "`required` at #/properties/a is not supported"),
    "look-ahead": ({"items": {"pattern": "^(?!a)"}}, r"`pattern` at #/items has `\(\?!`: look-around"),
    "look-behind of names": ({"patternProperties": {"(?<=a)b": {}}}, r"`patternProperties` at # has `\(\?<=`"),
    "word boundary": ({"pattern": r"a\b"}, r"`pattern` at # has `\\b`"),
    "back-reference": ({"pattern": r"(a)\1"}, r"`pattern` at # has `\\1`"),
    "some of several properties": ({**A_AND_B, "maxProperties": 2}, "`maxProperties` at # is not supported above 1"),
    "one of very many properties": (
        {"properties": {f"a{number}": {} for number in range(33)}, "minProperties": 1},
        "`minProperties` at # is not supported with more than 32 optional properties",
    ),
    "two lists of items": ({"prefixItems": [{}], "items": [INTEGER]}, "`prefixItems` at # is not supported beside"),
    "no schema": ({"properties": {"a": {"items": "string"}}, "anyOf": [3]}, "the schema at #/anyOf/0 is neither"),
    "overlap of objects": (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]},
        "may match the same value",
    ),
    "overlap of a list of items and all items": (
        {
            "type": "array",
            "minItems": 1,
            "oneOf": [{"prefixItems": [INTEGER], "items": {"type": "null"}}, {"items": INTEGER}],
        },
        "may match the same value",
    ),
    "overlap": ({"oneOf": [{"minimum": 1}, {"maximum": 1}]}, "schemas 0 and 1 may match the same value: use anyOf"),
    "oneOf of no type": ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "may match the same value"),
    "keywords beside a reference of draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "oneOf": [{"$ref": "#/definitions/a", "type": "integer"}, {"type": "string"}],
            "definitions": {"a": {}},
        },
        "schemas 0 and 1 may match the same value",
    ),
    "remote": ({"$ref": "https://example.com/a"}, "points to 'https://example.com/a', which is not in the schema"),
    "nested identifier": ({"items": {"$id": "b", "$ref": "#/a"}, "a": {}}, "`\\$id` at #/items"),
    "nested identifier of draft 4": ({"items": {"id": "b", "$ref": "#/a"}, "a": {}}, "`id` at #/items"),
    "reference into another base": (
        {"$ref": "#/$defs/b/items", "$defs": {"b": {"$id": "b", "items": {"$ref": "#/$defs/a"}}, "a": {}}},
        "points to '#/\\$defs/b/items'",
    ),
    "nested": ({"enum": [json.loads("[" * 200 + "]" * 200)]}, "deeper than 128 levels"),
}


@pytest.mark.parametrize(("schema", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_keyword_that_no_grammar_holds_is_refused_with_its_place(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        rewrite_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5, "required": 3, "oneOf": 1, "$ref": "#", "allOf": {}, "type": 3},
        {"oneOf": [], "dependentRequired": 3, "propertyNames": 7, "minProperties": "x", "format": 3},
        {"propertyNames": {"type": 3}},
        {"propertyNames": {"enum": 7}},
        {"oneOf": [3, None], "anyOf": [True, False], "enum": 7, "items": "x", "maxItems": "y"},
    ],
)
def test_a_malformed_schema_is_refused_or_left_to_the_compiler(schema: dict[str, Any]) -> None:
    with suppress(ValueError):
        rewrite_schema(schema)


def kind(value: Any, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": value}, "required": list(required)}


@pytest.mark.parametrize(
    ("one", "other", "disjoint"),
    [
        ({"type": "integer"}, {"type": "number"}, False),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": [1]}, {"const": [1.0]}, False),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}, False),
        ({"enum": ["a", "b"]}, {"type": "integer"}, True),
        ({"maximum": 5}, {"minimum": 6}, False),
        ({**INTEGER, "maximum": 5}, {**INTEGER, "minimum": 6}, True),
        ({**INTEGER, "maximum": 5}, {**INTEGER, "exclusiveMinimum": 5}, True),
        ({"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}, True),
        (kind({"const": "a"}, "kind"), kind({"const": "b"}, "kind"), True),
        (kind({"const": "a"}, "kind"), kind({"const": "b"}), False),
        (kind({"const": "a"}, "kind"), {**kind({}), "additionalProperties": False}, False),
        (kind({"const": "a"}, "kind"), {"type": "object", "additionalProperties": False}, True),
        ({"type": "array", "items": INTEGER}, {"type": "array", "items": {"type": "null"}}, False),
        ({"type": "array", "items": INTEGER, "minItems": 1}, {"type": "array", "items": {"type": "null"}}, True),
        ({"anyOf": [INTEGER, {"type": "null"}]}, {"type": "string"}, True),
        ({"anyOf": [INTEGER, {"type": "null"}]}, {"enum": [None]}, False),
        ({"allOf": [{"$ref": "#/$defs/i"}]}, {"type": "string"}, True),
        ({"$ref": "#"}, {"$ref": "#"}, False),
        (False, {}, True),
    ],
)
def test_schemas_are_disjoint_only_if_no_value_matches_both(one: Any, other: Any, disjoint: bool) -> None:
    overlaps = Overlaps(References({"$defs": {"i": INTEGER}}))
    assert overlaps.are_disjoint([one], [other]) is disjoint
    assert overlaps.are_disjoint([other], [one]) is disjoint


def test_the_comparison_of_hostile_schemas_is_bounded() -> None:
    names = [f"a{number}" for number in range(40)]
    definitions = {name: {"oneOf": [{"$ref": f"#/$defs/{other}"} for other in names]} for name in names}
    overlaps = Overlaps(References({"$defs": definitions}))
    assert not overlaps.are_disjoint([{"$ref": "#/$defs/a0"}], [{"$ref": "#/$defs/a1"}])
    assert overlaps._n_steps < 400_000


def test_the_search_for_large_multiples_leaves_the_steps_to_one_of() -> None:
    node = {"$ref": "#/$defs/node"}
    parts = dict.fromkeys("abcd", node)
    schema = {
        "$defs": {"base": {"properties": parts}, "node": {"allOf": [{"$ref": "#/$defs/base"}], "properties": parts}},
        "properties": {"node": node, "n": {"multipleOf": 5}, "z": {"oneOf": [{"maximum": 1}, {"minimum": 2}]}},
    }
    schema["properties"]["z"]["type"] = "integer"  # type: ignore[index]
    assert rewrite_schema(schema)
