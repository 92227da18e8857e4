"""Grammars of JSON schemas: the values that they allow, and the reasons why schemas are refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.grammars import is_whole_output

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BAD_SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "deep": (nested_schema(150), "nests deeper than 128 levels"),
    "remote reference": ({"$ref": "https://example.com/schema.json"}, "copy it into $defs"),
    "unknown type": ({"type": "nothing"}, "Invalid type: nothing"),
    "wrong type": ({"properties": 5}, "properties must be an object"),
    "huge": ({"enum": ["x" * 70_000]}, "larger than"),
    "bad pattern": ({"type": "string", "pattern": "("}, "regex parse error"),
    "control character": (
        {"properties": {"a": {"enum": [["a\0b"]]}}},
        "`enum` at #/properties/a has the character U+0000",
    ),
    "number that is rounded": ({"enum": [1, 175928847299117063]}, "`enum` at # has the number 175928847299117063"),
    "smallest integer of 64 bits": ({"const": -(2**63)}, "`const` at # has the number -9223372036854775808"),
    "two large multiples": (
        {"allOf": [{"type": "integer", "multipleOf": 86_400}, {"multipleOf": 86_400}]},
        "`multipleOf` at # is too large",
    ),
    "delete character": ({"const": {"a": "\x7f"}}, "`const` at # has the character U+007F"),
    "not supported": ({"type": "array", "items": {"not": {"type": "string"}}}, "`not` at #/items is not supported"),
    "overlapping": (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "its schemas 0 and 1 may match the same value",
    ),
}


@pytest.mark.parametrize(("schema", "reason"), BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
def test_a_bad_schema_is_refused_with_a_reason(
    sandbox: GrammarSandbox, vocab: Vocab, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(JobRejected) as refused:
        ConstraintTokenizer(vocab).compile(sandbox.check(JobParams(json_schema=schema)).text)
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR
    assert reason in refused.value.message


def names_of_format(name: str) -> dict[str, Any]:
    return {"type": "object", "propertyNames": {"format": name}, "additionalProperties": {"type": "integer"}}


def number(**keywords: Any) -> dict[str, Any]:
    return {"type": "number", **keywords}


def integer(**keywords: Any) -> dict[str, Any]:
    return {"type": "integer", **keywords}


ADMIN = {
    "type": "object",
    "properties": {"admin": {"const": False}},
    "required": ["admin"],
    "patternProperties": {"^x": {"type": "integer"}},
}
TREE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
}
"""A recursive schema, as pydantic makes it."""


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, ["1", '"x"', "[null]"], ["nothing"]),
        (nested_schema(20), ["[" * 20 + '"x"' + "]" * 20], ["[" * 19 + '"x"' + "]" * 19]),
        ({"type": "string"}, ['"a\\n"'], ['"a\n"']),
        ({"type": "integer", "minimum": 3, "maximum": 20}, ["3", "20"], ["2", "21", "3.5"]),
        ({"type": "integer", "multipleOf": 7}, ["14", "700"], ["15"]),
        ({"type": "string", "pattern": "\\d+"}, ['"a1b"', '"22"'], ['"ab"']),
        ({"type": "string", "maxLength": 70}, ['"' + 70 * "a" + '"'], ['"' + 71 * "a" + '"']),
        ({"type": "array", "prefixItems": [integer()], "additionalItems": False}, ["[1]", '[1, "a"]'], ['["a"]']),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 70}, ["[]", "[null, null]"], ["[1]"]),
        (
            {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
            ['{"n_a": 1}'],
            ['{"n_a": "x"}', '{"m": 1}'],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ["true"]),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": 1}', '{"b": 2}'],
            ['{"a": 1, "b": 2}', "{}"],
        ),
        (
            {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}, "type": "object"},
            ["{}", '{"b": 2}', '{"a": 1, "b": 2}'],
            ['{"a": 1}'],
        ),
        ({"type": "string", "pattern": r"^\s[\s]$"}, ['" \u2003"', '"\\t "'], ['" \x85"', '"\ufeff "', '"a "']),
        ({"type": "string", "pattern": r"^\S[^\s]$"}, ['"aé"'], ['" a"', '"a\x85"', '"\ufeffa"', '"a\ufeff"']),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 1},
            ['{"a": 1}', '{"b": 2}'],
            ["{}", '{"a": 1, "b": 2}', '{"a": 1, "c": 2}'],
        ),
        (
            {
                "oneOf": [
                    {"type": "object", "required": [name], "properties": {name: {"type": "null"}}} for name in "ab"
                ]
            },
            ['{"a": null}', '{"b": null, "c": 1}'],
            ["{}", '{"a": 1}', '{"a": null, "b": null}'],
        ),
        ({"type": "string", "pattern": '^[^"]*$'}, ['"a\\\\\\n"', '"é"'], ['"\\""', '"a\\""']),
        ({"type": "string", "pattern": r'^[^<>:"/\\|?*]+$'}, ['"a b"', '"\\t"'], ['"\\""', '"\\\\"', '"a|"']),
        ({"type": "string", "pattern": r"^(\PP|\p{Cc}|[\x00-\x1f])*$"}, ['"a\\n"'], ['"\\""', '"\\\\"']),
        ({"type": "string", "pattern": r'^[\x00-\x1f"a-z]+$'}, ['"a\\"\\t"'], ['"\\\\"', '"A"']),
        (
            {"patternProperties": {'^[^"]*$': {}}, "additionalProperties": False, "type": "object"},
            ['{"a": 1}'],
            ['{"\\"": 1}'],
        ),
        (
            {**ADMIN, "additionalProperties": {"type": "boolean"}},
            ['{"admin": false, "é\\"": true}'],
            ['{"admin": false, "\\u0061dmin": true}', '{"admin": false, "\\u0078": true}'],
        ),
        (ADMIN, ['{"admin": false, "b": "x"}'], ['{"admin": false, "admi\\u006e": 1}', '{"admin": false, "a\\/b": 1}']),
        (
            {"type": "string", "format": "date"},
            ['"2023-01-31"', '"2024-02-29"', '"2000-02-29"', '"0004-02-29"', '"2023-02-28"'],
            ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"2023-04-31"', '"2023-13-01"', '"0000-01-01"'],
        ),
        (
            {"type": "string", "format": "time"},
            ['"23:59:59Z"', '"00:00:00.123+05:30"'],
            ['"10:10:60Z"', '"24:00:00Z"', '"10:10:10"', '"10:10:10+24:00"'],
        ),
        (
            {"type": "string", "format": "date-time", "maxLength": 20},
            ['"2024-02-29T10:00:59Z"'],
            ['"2023-02-29T10:00:00Z"', '"2023-01-01T10:00:60Z"', '"2024-02-29T10:00:59.1Z"'],
        ),
        (
            {"type": "string", "format": "idn-hostname"},
            ['"example.org"', '"a-b.C"'],
            ['"xn--X"', '"-a"', '"a-"', '"a..b"', '""', f'"{"a" * 64}"'],
        ),
        (names_of_format("ipv4"), ['{"127.0.0.1": 1}', "{}"], ['{"127.0.0.256": 1}', '{"a": 1}']),
        (names_of_format("date-time"), ['{"2024-02-29T10:00:00Z": 1}'], ['{"2024-02-30T10:00:00Z": 1}']),
        (names_of_format("idn-email"), ['{"a.b@example.org": 1}'], ['{"a": 1}', '{"a@b@c.d": 1}']),
        (names_of_format("hostname"), ['{"example.org": 1}'], ['{"-a": 1}', '{"a-": 1}', '{"a..b": 1}']),
        (names_of_format("uri"), ['{"https://example.org/a": 1}'], ['{"a": 1}']),
        (names_of_format("ipv6"), ['{"0:0:0:0:0:0:0:1": 1}'], ['{"1:2": 1}']),
        (names_of_format("duration"), ['{"P3DT4H": 1}', '{"PT5M": 1}'], ['{"P": 1}', '{"P3DT": 1}']),
        (names_of_format("path"), ['{"a/b": 1}'], ['{"a": "x"}']),
        (number(exclusiveMinimum=0, maximum=0.5), ["0.1", "0.5"], ["0", "0.0", "-0", "0.6"]),
        (number(minimum=0, exclusiveMinimum=True, maximum=0.5), ["0.1", "0.5"], ["0", "0.0", "0.6"]),
        (integer(maximum=10**18, exclusiveMaximum=True), ["999999999999999872"], ["1000000000000000000"]),
        (number(exclusiveMinimum=2, maximum=2.5), ["2.1"], ["2", "2.0"]),
        (number(minimum=-0.5, exclusiveMaximum=0), ["-0.1"], ["0", "-0", "-0.0"]),
        (number(exclusiveMinimum=0), ["0.0000000001", "7"], ["0", "-1"]),
        (number(allOf=[{"exclusiveMinimum": 0}, {"maximum": 0.5}]), ["0.1"], ["0", "1"]),
        (number(minimum=-1e308, maximum=1e308), ["-1000000000000000000", "0.5"], []),
        (integer(minimum=-(2**63), maximum=2**63 - 1), ["-1", "0", "1000000000000000000"], ["9223372036854775808"]),
        (integer(minimum=10**18), ["1000000000000000000"], ["999999999999999999", "-1"]),
        (integer(maximum=-(10**18)), ["-1000000000000000000"], ["-999999999999999999", "1"]),
        (integer(minimum=2**53 + 1), ["9007199254740994"], ["9007199254740992"]),
        (integer(exclusiveMinimum=2**53), ["9007199254740994"], ["9007199254740992"]),
        (integer(exclusiveMaximum=10**18), ["1"], ["1000000000000000000"]),
        (
            {"$ref": "#/$defs/a", "maximum": 5.5, "$defs": {"a": number(exclusiveMinimum=5)}},
            ["5.1", "5.5"],
            ["5", "5.6"],
        ),
        (
            {"$ref": "#/$defs/a", "maximum": 5.5, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"exclusiveMinimum": 5}}},
            ["5.1"],
            ["5", "6"],
        ),
        ({"anyOf": [number(exclusiveMinimum=5), {"type": "null"}], "maximum": 5.5}, ["5.1", "null"], ["5", "6"]),
        (number(allOf=[{"exclusiveMinimum": 5, "maximum": 9}, {"maximum": 5.5}]), ["5.1"], ["5", "6"]),
        (number(exclusiveMinimum=5, anyOf=[{"maximum": 5.5}, {"minimum": 7}]), ["5.1", "7"], ["5", "6"]),
        (
            {
                "type": "object",
                "properties": {"a": number(exclusiveMinimum=5)},
                "patternProperties": {"^a": {"maximum": 5.5}},
            },
            ['{"a": 5.1}'],
            ['{"a": 5}'],
        ),
        (
            {"type": "array", "allOf": [{"items": {"exclusiveMinimum": 5}}, {"items": {"maximum": 5.5}}]},
            ["[5.1]"],
            ["[5]"],
        ),
        ({"const": {"\1": "\b\t\n\f\r\u0080"}}, ['{"\\u0001": "\\b\\t\\n\\f\\r\u0080"}'], ['{"": ""}']),
        (
            {"enum": [2**53, 1 - 2**53, 2**62, 2**63 - 1, 2**63 - 1024, 1024 - 2**63, 1e18, 0.1, 1e-7]},
            [
                *("9007199254740992", "-9007199254740991", "4611686018427387904", "9223372036854775807", "0.1"),
                *("9223372036854774784", "-9223372036854774784", "1000000000000000000", "0.0000001"),
            ],
            ["9007199254740993", "9223372036854775808", "0.10"],
        ),
        (number(allOf=[{"multipleOf": 0.01}, {"multipleOf": 0.25}]), ["0.25", "1.50"], ["0.01", "0.255"]),
        (integer(allOf=[{"multipleOf": 60_000}, {"multipleOf": 60_000}]), ["0", "120000"], ["90000", "60001"]),
        (
            {
                "type": "object",
                "properties": {"a1": integer(), "b": {}},
                "additionalProperties": False,
                "allOf": [{"propertyNames": {"pattern": "^a"}}],
            },
            ["{}", '{"a1": 1}'],
            ['{"a1": "x"}', '{"abc": 1}', '{"b": 1}'],
        ),
        (
            {"type": "object", "propertyNames": {"maxLength": 2.0}, "additionalProperties": integer()},
            ['{"ab": 1}'],
            ['{"abc": 1}'],
        ),
        (
            {"oneOf": [number(maximum=5, exclusiveMaximum=True), number(minimum=5, exclusiveMinimum=False)]},
            ["4.5", "5", "6"],
            ['"5"'],
        ),
        (TREE, ['{"v": 1, "next": {"v": 2, "next": null}}'], ['{"v": 1}']),
    ],
)
def test_a_schema_allows_the_values_that_it_describes(
    sandbox: GrammarSandbox, vocab: Vocab, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    compiled = sandbox.check(JobParams(json_schema=schema)).text
    assert [text for text in good if not is_whole_output(vocab, compiled, text)] == []
    assert [text for text in bad if is_whole_output(vocab, compiled, text)] == []
