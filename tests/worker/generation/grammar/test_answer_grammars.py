"""Grammars of tool calls: those around plain JSON schemas compile without a trial, and in a short time."""

from __future__ import annotations

import json
import time
from itertools import product
from typing import Any

import pytest
from tests.support.grammars import is_whole_output
from tests.worker.generation.grammar.test_plain_schemas import (
    COSTLY,
    EXPENSIVE,
    MAX_COMPILATION_S,
    NOT_PLAIN,
    PLAIN,
    REFUSED,
    record,
    texts,
)

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.json_schema.rewriting import SCHEMA_OPTIONS
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.producer.answer_parts.answer_format import AnswerForm, AnswerFormat
from llamaq.producer.answer_parts.answer_grammar import answer_grammar
from llamaq.worker.generation.grammar.answer_grammars import answer_part_of_limits
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.sandbox_process import GrammarTrial, lark_grammar
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer

AGE = record(age={"type": "integer", "minimum": 3})
REASONING: tuple[dict[str, Any], ...] = (
    {},
    {"reasoning_open": "<think>", "reasoning_close": "</think>"},
    {"reasoning_open": "<think>", "reasoning_close": "</think>", "starts_in_reasoning": True},
    {"reasoning_open": "[THINK]", "reasoning_close": "[/THINK]", "tag_tokens": {"[THINK]": 5, "[/THINK]": 6}},
)


def is_plain_answer_grammar(lark: str) -> bool:
    return answer_part_of_limits(lark) <= 1


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calls_of(*schemas: dict[str, Any], name: str = "f") -> str:
    """Return the grammar of a call of one of several tools, which all have the same name."""
    form = AnswerForm(format=AnswerFormat.HERMES, has_tools=True, **REASONING[1])
    return answer_grammar(form, [tool(name, schema) for schema in schemas])


def imitated(schema: str) -> str:
    """Return a grammar like that of a call, with a schema that no client has checked."""
    return f'start: calls\ncalls: object\nobject: object0\nobject0: "a" arguments0 "}}"\narguments0: %json {schema}'


def with_options(schema: dict[str, Any], **options: Any) -> str:
    return json.dumps({**schema, "x-guidance": SCHEMA_OPTIONS | options})


@pytest.mark.parametrize("answer_format", AnswerFormat)
@pytest.mark.parametrize("reasoning", REASONING)
def test_each_grammar_of_the_clients_is_plain(answer_format: AnswerFormat, reasoning: dict[str, Any]) -> None:
    form = AnswerForm(format=answer_format, has_tools=True, **reasoning)
    tokens = {tag: number for number, tag in enumerate(("<tool_call>", "</tool_call>", "[TOOL_CALLS]"), 10)}
    forms = form, form.model_copy(update={"tag_tokens": form.tag_tokens | tokens})
    tools = [tool("größe", AGE), tool('"\\a/', {}), tool("c", PLAIN["tree"])]
    for each, demanded, schema, parallel in product(forms, ([], tools), (None, AGE), (True, False)):
        if demanded or schema is not None:
            assert is_plain_answer_grammar(answer_grammar(each, demanded, schema, parallel=parallel))


@pytest.mark.parametrize("schema", PLAIN.values(), ids=PLAIN)
def test_the_grammar_of_a_tool_with_a_plain_schema_is_plain(schema: dict[str, Any]) -> None:
    assert is_plain_answer_grammar(calls_of(schema))


NOT_REWRITTEN: dict[str, dict[str, Any]] = {
    **NOT_PLAIN,
    **REFUSED,
    "large number": {"type": "integer", "maximum": 10**30},
    "infinite number": {"type": "number", "maximum": float("inf")},
    "definitions of a wrong type": {"$defs": [True]},
    "unknown keyword": {"type": "string", "x-pattern": "a"},
}
"""Schemas as no client of llamaq writes them into a grammar."""


@pytest.mark.parametrize("schema", NOT_REWRITTEN.values(), ids=NOT_REWRITTEN)
def test_a_grammar_with_another_schema_is_not_plain(schema: dict[str, Any]) -> None:
    assert is_plain_answer_grammar(imitated(with_options(AGE)))
    assert not is_plain_answer_grammar(imitated(with_options(schema)))
    assert not is_plain_answer_grammar(f"{calls_of(AGE)}\ncontent: %json {with_options(schema)}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"\\n" object', '"\\n" /(a|b)*a(a|b){999}/ object'),
        ("/(.|\\n)*/", "/((.|\\n){0,99}){99}/"),
        ("/(.|\\n)*/", "/(.|\\n)*/ & /a*/"),
        ("SPACE?", "SPACE{999}"),
        ("SPACE: /[ \\n]{1,4}/", "SPACE: /[ \\n]{1,4000}/"),
        ("SPACE: /[ \\n]{1,4}/", "SPACE: /[ \\n]{1,4}/i"),
        ("object: object0", "object: object0 object"),
        ("object: object0", "object: object0{1,999}"),
        ('"</think>"', json.dumps("x" * 65)),
        ('"</think>"', '""'),
        ('"</think>"', '"</think>", max_tokens=5'),
        ('("<think>" reasoning)?', "(<[0-99]> reasoning)?"),
        ('("<think>" reasoning)?', "(<[\u0663]> reasoning)?"),
        ('("<think>" reasoning)?', '("<think>"i reasoning)?'),
        ("\nobject:", "\n%llguidance {}\nobject:"),
        ("\nobject:", "\n# \nobject:"),
        ("\nobject:", "\r\nobject:"),
        ("\nobject:", "\nT: /a/\nobject:"),
        ("\nobject:", "\nobject: %regex {}\nobject:"),
        ('"</tool_call>"', '"</tool_call>\t"'),
        ("arguments0: %json ", "arguments0: %json  "),
        ("arguments0: %json ", "arguments0: %lark "),
        ('"required": ["age"]', '"required":["age"]'),
        ('"type": "object"', f'"type": "object", "properties": {json.dumps({"a": COSTLY})}'),
        ('"minimum": 3', f'"minimum": {"9" * 5000}'),
        ('"minimum": 3', '"minimum": 1e999'),
        ('"minimum": 3', '"minimum": 3, "x-guidance": {}'),
        ('"minimum": 3', f'"minimum": 3, "default": {"[" * 10_000}{"]" * 10_000}'),
        (', "x-guidance": ', ', "x-other": '),
    ],
)
def test_a_grammar_that_only_resembles_those_of_the_clients_is_not_plain(old: str, new: str) -> None:
    grammar = calls_of(AGE)
    assert grammar.count(old) == 1
    assert not is_plain_answer_grammar(grammar.replace(old, new))


def test_a_schema_inside_a_grammar_has_the_usual_options() -> None:
    assert is_plain_answer_grammar(imitated(with_options(AGE)))
    assert not is_plain_answer_grammar(imitated(with_options(AGE, whitespace_pattern="(a{0,99}){99}")))
    assert not is_plain_answer_grammar(imitated(with_options(AGE, coerce_one_of=True)))
    assert not is_plain_answer_grammar(imitated(json.dumps(AGE)))


def test_the_schemas_of_a_plain_grammar_are_together_as_small_as_one_plain_schema() -> None:
    text = texts(pattern="a" * 1000)
    assert is_plain_answer_grammar(calls_of(*[text] * 13))
    assert not is_plain_answer_grammar(calls_of(*[text] * 17))
    several = record(**{f"a{number}": True for number in range(24)})
    assert is_plain_answer_grammar(calls_of(*[several] * 7))
    assert not is_plain_answer_grammar(calls_of(*[several] * 8))
    assert not is_plain_answer_grammar(calls_of(AGE, name="x" * 17_000))
    assert not is_plain_answer_grammar(calls_of(AGE) + "\n" * 60_000)


@pytest.mark.parametrize("schema", EXPENSIVE.values(), ids=EXPENSIVE)
def test_the_most_expensive_plain_grammars_compile_in_a_short_time(vocab: Vocab, schema: dict[str, Any]) -> None:
    grammar = calls_of(*schema.get("anyOf", [schema])[:60])
    assert is_plain_answer_grammar(grammar)
    tokenizer = ConstraintTokenizer(vocab)
    started_s = time.process_time()
    tokenizer.compile(lark_grammar(grammar))
    assert time.process_time() - started_s < MAX_COMPILATION_S


@pytest.mark.parametrize("alternatives", ["object0", " | ".join(["object0"] * 1000)])
def test_a_plain_grammar_needs_no_process(vocab: Vocab, monkeypatch: pytest.MonkeyPatch, alternatives: str) -> None:
    def fail(*args: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("subprocess.Popen", fail)
    grammar = calls_of(AGE).replace("object: object0", f"object: {alternatives}")
    sandbox = GrammarSandbox(vocab)
    try:
        compiled = sandbox.check(JobParams(lark=grammar)).text
    finally:
        sandbox.close()
    assert compiled == GrammarTrial(vocab).compile({"kind": "lark", "value": grammar, "root": "root"}).grammar
    call = '<think>Well</think>\n<tool_call>\n{"name": "f", "arguments": {"age": %d}}\n</tool_call>'
    assert is_whole_output(vocab, compiled, call % 3)
    assert not is_whole_output(vocab, compiled, call % 2)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (calls_of(texts(pattern="(")), "regex parse error"),
        (imitated(with_options({"$ref": "#/$defs/missing"})), "missing"),
        ("start: calls", "calls"),
        ("start: calls\ncalls: object\ncalls: object\nobject: object0", "calls"),
        ("start: calls\n" + imitated(with_options(AGE)), "start"),
    ],
    ids=["bad pattern", "missing reference", "missing rule", "repeated rule", "two starts"],
)
def test_a_plain_grammar_that_does_not_compile_is_refused(vocab: Vocab, grammar: str, reason: str) -> None:
    assert is_plain_answer_grammar(grammar)
    with pytest.raises(JobRejected, match=reason) as refused:
        ConstraintTokenizer(vocab).compile(lark_grammar(grammar))
    assert refused.value.code == ErrorCode.INVALID_GRAMMAR


def test_the_text_of_a_schema_cannot_end_the_schema(vocab: Vocab) -> None:
    value = '} | "x" start: /(a|b)*/ %json {"'
    compiled = lark_grammar(imitated(with_options({"const": value})))
    assert is_whole_output(vocab, compiled, f"a{json.dumps(value)}}}")
    assert not is_whole_output(vocab, compiled, "x")


def test_a_costly_schema_inside_a_grammar_of_calls_is_tried_first(vocab: Vocab) -> None:
    sandbox = GrammarSandbox(vocab, timeout_s=0.5)
    try:
        with pytest.raises(JobRejected, match=r"takes more than 0\.5 s"):
            sandbox.check(JobParams(lark=imitated(with_options(COSTLY))))
    finally:
        sandbox.close()
