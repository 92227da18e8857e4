"""Plain JSON schemas: they compile without a trial, and in a short time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.grammars import is_whole_output

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.json_schemas import json_schema_grammar, plain_schema_grammar
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer

TEXT: dict[str, Any] = {"type": "string"}
MAX_COMPILATION_S = 1.0
"""Processor time for the most expensive plain schema, which takes 0.08 s on a usual machine."""


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def any_of(*schemas: Any) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def array(items: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **keywords}


def nested_array(depth: int, size: int) -> dict[str, Any]:
    return array(nested_array(depth - 1, size) if depth else TEXT, minItems=size, maxItems=size + 5)


def texts(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


PLAIN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "optional": any_of(TEXT, {"type": "null"}),
    "several types": {"type": ["string", "null"], "maxLength": 5, "title": "A", "default": None},
    "record": record(name=texts(minLength=1, maxLength=40), age={"type": "integer", "minimum": 0, "maximum": 130}),
    "closed record": record(a=True) | {"additionalProperties": False},
    "map": {"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0.5}},
    "tuple": {"type": "array", "prefixItems": [TEXT, {"type": "boolean"}], "minItems": 2, "maxItems": 2},
    "values": record(a={"const": "x"}, b={"enum": ["a", 1, None, 2.5, True]}),
    "pattern": texts(pattern=r"^(\+\d{1,3} )?\d{3,14}(?:-[a-z]+)*$"),
    "format": array(texts(format="date-time"), maxItems=10),
    "exclusive parts": {"oneOf": [TEXT, {"type": "null"}]},
    "union with a discriminator": {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}},
        "$defs": {name: record(kind={"const": name, "default": name, "type": "string"}) for name in ("cat", "dog")},
    },
    "pattern and length": texts(pattern="^a+$", minLength=1, maxLength=5),
    "format and length": texts(format="uri", minLength=1, maxLength=2083),
    "date and length": texts(format="date-time", maxLength=30),
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 8},
    "fraction": {"type": "number", "multipleOf": 0.01, "exclusiveMaximum": 99.5},
    "pattern of names": {"type": "object", "patternProperties": {"^[a-z]{1,9}$": TEXT}, "additionalProperties": False},
    "names of an extension": record(name=TEXT) | {"patternProperties": {"^x-": {"type": "integer"}}},
    "names": {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": {"type": "integer"}},
    "names with a format": {"type": "object", "propertyNames": {"format": "date"}},
    "number of properties": {"type": "object", "minProperties": 1, "maxProperties": 9},
    "keywords of several types": {"minLength": 2, "maximum": 9, "items": TEXT, "required": ["a"]},
    "single part": record(a={"allOf": [{"$ref": "#/$defs/a"}], "default": None}) | {"$defs": {"a": TEXT}},
    "unknown keyword": {"type": "string", "x-pattern": "a"},
    "large number": {"type": "integer", "maximum": 10**30},
    "infinite number": {"type": "number", "maximum": float("inf")},
    "unused definitions of a wrong type": {"$defs": [TEXT]},
    "list of itself": array({"$ref": "#"}),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(next=any_of({"type": "null"}, {"$ref": "#/$defs/node"}))},
    },
}
COSTLY: dict[str, Any] = {"allOf": [texts(pattern=f"(a|b)*a(a|b){{{n}}}$") for n in range(40)]}
"""The intersection of its patterns takes minutes."""
NOT_PLAIN: dict[str, dict[str, Any]] = {
    "parts": {"allOf": [texts(pattern="^a"), texts(pattern="b$")]},
    "exclusive parts that take long to compare": {
        "oneOf": [any_of(*({"const": (n, m)} for m in range(10))) for n in range(19)]
    },
    "equal references to many values": {
        "oneOf": [{"$ref": "#/$defs/a"} for _ in range(180)],
        "$defs": {"a": {"enum": list(range(2000))}},
    },
    "exclusive parts with a sibling": {"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}]},
    "names of which one matches": record(**{"x-a": TEXT}) | {"patternProperties": {"^x-": texts(pattern="a")}},
    "names that may match": record(name=TEXT) | {"patternProperties": {"^x?": texts(pattern="a")}},
    "several patterns of names": {"type": "object", "patternProperties": {"^a": TEXT, "^b": TEXT}},
    "costly pattern of names": {"type": "object", "patternProperties": {"(a{100}){100}": TEXT}},
    "large multiple": {"type": "integer", "multipleOf": 999_983},
    "fraction with many digits": {"type": "number", "multipleOf": 0.999983},
    "no multiple": {"type": "integer", "multipleOf": 0},
    "format with a pattern": texts(format="uri", pattern="a"),
    "many patterns with lengths": any_of(*(texts(pattern=f"a+{n}", maxLength=99) for n in range(51))),
    "reference with a sibling": {"$ref": "#/$defs/a", "pattern": "a", "$defs": {"a": texts(pattern="b")}},
    "reference to a default": {"$ref": "#/default", "default": COSTLY},
    "reference to an example": array({"$ref": "#/examples/0"}, examples=[COSTLY]),
    "reference into a definition": {"$ref": "#/$defs/a/title", "$defs": {"a": TEXT | {"title": COSTLY}}},
    "escaped reference": {"$ref": "#/$defs/a%2Ftitle", "$defs": {"a": TEXT | {"title": COSTLY}}},
    "alternatives with a sibling": {"anyOf": [texts(pattern="b")], "pattern": "a"},
    "repeated group": texts(pattern="(a{100}){100}"),
    "repeated repetition": texts(pattern="a{100}{100}"),
    "repeated star": texts(pattern="a*{100}"),
    "repetition behind a space": texts(pattern="(?x)a{999} {999}"),
    "many repetitions": texts(pattern="a{1000}"),
    "long string": texts(maxLength=4001),
    "long array": array(TEXT, minItems=1001),
    "many schemas": record(**{f"a{number}": TEXT for number in range(200)}),
    "much text": {"enum": ["x" * 17_000]},
    "deep in a tuple": {"type": "array", "prefixItems": [any_of(TEXT, {"allOf": [TEXT, TEXT]})]},
    "unknown type": {"type": "nothing"},
    "properties of a wrong type": {"properties": 5},
    "schema of a wrong type": {"items": "string"},
    "values of a wrong type": {"enum": [{"a": 1}]},
}
REFUSED: dict[str, dict[str, Any]] = {
    "deep in a definition": {"$ref": "#/$defs/a", "$defs": {"a": array(array({"not": TEXT}))}},
}
"""Schemas that are refused before it is known whether they are plain."""
EXPENSIVE: dict[str, dict[str, Any]] = {
    "integers with bounds": any_of(
        *({"type": "integer", "minimum": -(10**17) - n, "maximum": 10**17 + 7 * n} for n in range(190))
    ),
    "numbers with bounds": any_of(
        *({"type": "number", "minimum": n + 0.123456789, "maximum": 1e15 + n / 7} for n in range(190))
    ),
    "classes of letters": any_of(*(texts(pattern=rf"\w{{{n},999}}" * 8) for n in range(1, 100))),
    "states that multiply": any_of(*(texts(pattern=f"^{f'[ab]*a[ab]{{{n}}}' * 4}$") for n in range(1, 150))),
    "white space": texts(pattern=r"(\S|\s)*" * 350),
    "many stars": texts(pattern="a*" * 4000 + "a?" * 2000),
    "many alternatives": texts(pattern="|".join(f".*{number}.*" for number in range(1200))),
    "letters of either case": texts(pattern=r"[a-zA-Z\u00e0-\u00ff\u0400-\u04ff]*" * 300),
    "groups in groups": texts(pattern="(" * 45 + "a*b|" * 1000 + ")*" * 45),
    "optional properties": {"properties": {"a" * n: True for n in range(1, 150)}},
    "arrays of arrays": nested_array(depth=100, size=990),
    "many arrays": record(**{f"a{n}": array(texts(maxLength=900 + n), minItems=900 - n) for n in range(95)}),
    "references in a circle": {
        "$ref": "#/$defs/0",
        "$defs": {
            str(n): array(any_of(*({"$ref": f"#/$defs/{other}"} for other in range(13))), minItems=900)
            for n in range(13)
        },
    },
    "multiples with bounds": any_of(
        *({"type": "integer", "multipleOf": 128 - n, "minimum": -(10**15) - n, "maximum": 10**15} for n in range(50))
    ),
    "fractions with bounds": any_of(
        *({"type": "number", "multipleOf": 0.125, "minimum": n + 0.1234, "maximum": 1e15 + n / 7} for n in range(50))
    ),
    "states with a length": any_of(
        *(texts(pattern=f"[ab]*a[ab]{{{n % 5}}}" * 2, minLength=1 + n % 7, maxLength=999) for n in range(50))
    ),
    "formats with a length": any_of(*(texts(format="uri", minLength=1 + n, maxLength=4000) for n in range(50))),
    "numbers of properties": any_of(
        *(
            {"type": "object", "minProperties": 1, "maxProperties": 999 - n, "additionalProperties": TEXT}
            for n in range(90)
        )
    ),
    "patterns of names": any_of(
        *(
            {"type": "object", "patternProperties": {rf"^\w+{n}\w*$": TEXT}, "additionalProperties": True}
            for n in range(50)
        )
    ),
    "exclusive unions": {
        "oneOf": [
            {"oneOf": [record(kind={"const": 10 * n + m}, **dict.fromkeys("abc", TEXT)) for m in range(4)]}
            for n in range(5)
        ]
    },
    "all formats": any_of(
        *(
            texts(format=name)
            for name in (
                *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
                *("json-pointer", "relative-json-pointer", "uri-reference", "iri", "idn-email"),
            )
        )
    ),
}

EXHAUSTING: dict[str, dict[str, Any]] = {
    "letters with a length": any_of(*(texts(pattern=r"^\w+$", minLength=800 + n, maxLength=950) for n in range(48))),
    "states with a length": texts(pattern="[ab]*a[ab]{200}", minLength=900, maxLength=999),
}
"""Plain schemas that exceed a limit of llguidance."""


def plain_grammar(schema: dict[str, Any]) -> str:
    grammar = plain_schema_grammar(schema)
    assert grammar is not None
    return grammar.text


@pytest.mark.parametrize("schema", PLAIN.values(), ids=PLAIN)
def test_usual_schemas_are_plain(schema: dict[str, Any]) -> None:
    assert plain_grammar(schema) == json_schema_grammar(schema)


@pytest.mark.parametrize("schema", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_a_schema_that_may_be_expensive_or_is_wrong_is_not_plain(schema: dict[str, Any]) -> None:
    assert plain_schema_grammar(schema) is None


@pytest.mark.parametrize("schema", REFUSED.values(), ids=REFUSED)
def test_a_schema_with_a_keyword_that_is_not_supported_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(JobRejected):
        plain_schema_grammar(schema)


def test_references_do_not_let_a_plain_schema_grow() -> None:
    """Each other spelling of a reference would become another copy of its target."""
    target = any_of(*(texts(maxLength=n) for n in range(120)))
    refs = [{"$ref": f"#/$defs/a{'' if n else '%61'}/anyOf/{n}"} for n in range(120)]
    assert plain_schema_grammar(any_of(*refs) | {"$defs": {"a": target}}) is None


@pytest.mark.parametrize("names", [{"enum": ["a", "b"]}, {"const": "a"}, {"$ref": "#/$defs/names"}])
def test_a_schema_that_grows_when_it_is_rewritten_is_not_plain(names: dict[str, Any]) -> None:
    schema: dict[str, Any] = TEXT
    for _ in range(60):
        schema = {"propertyNames": names, "additionalProperties": schema}
    assert plain_schema_grammar(schema | {"$defs": {"names": {"enum": ["a", "b"]}}}) is None


@pytest.mark.parametrize("pattern", ["{" * 16_000, ")" * 8000 + " " * 8000, "{1" * 8000, "(?" * 8000])
def test_a_pattern_is_checked_in_a_short_time(pattern: str) -> None:
    started_s = time.process_time()
    plain_schema_grammar(texts(pattern=pattern))
    assert time.process_time() - started_s < MAX_COMPILATION_S


@pytest.mark.parametrize("schema", EXPENSIVE.values(), ids=EXPENSIVE)
def test_the_most_expensive_plain_schemas_compile_in_a_short_time(vocab: Vocab, schema: dict[str, Any]) -> None:
    tokenizer = ConstraintTokenizer(vocab)
    started_s = time.process_time()
    tokenizer.compile(plain_grammar(schema))
    assert time.process_time() - started_s < MAX_COMPILATION_S


@pytest.mark.parametrize("schema", EXHAUSTING.values(), ids=EXHAUSTING)
def test_a_plain_schema_that_exceeds_a_limit_is_refused_in_a_short_time(vocab: Vocab, schema: dict[str, Any]) -> None:
    tokenizer = ConstraintTokenizer(vocab)
    started_s = time.process_time()
    with pytest.raises(JobRejected, match="the grammar cannot be used"):
        tokenizer.compile(plain_grammar(schema))
    assert time.process_time() - started_s < MAX_COMPILATION_S


def test_a_plain_schema_needs_no_process(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("subprocess.Popen", fail)
    sandbox = GrammarSandbox(vocab)
    try:
        compiled = sandbox.check(JobParams(json_schema=record(age={"type": "integer", "minimum": 3}))).text
    finally:
        sandbox.close()
    assert is_whole_output(vocab, compiled, '{"age": 3}')
    assert not is_whole_output(vocab, compiled, '{"age": 2}')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (texts(pattern="("), "regex parse error"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no token of this model's vocabulary"),
    ],
    ids=["bad pattern", "missing reference", "endless reference"],
)
def test_a_plain_schema_that_does_not_compile_is_refused(vocab: Vocab, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(JobRejected, match=reason) as refused:
        ConstraintTokenizer(vocab).compile(plain_grammar(schema))
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR
