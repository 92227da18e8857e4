from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from llamaq.common.errors import InvalidRequest, JobRejected
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.producer.answer_parts.answer_format import AnswerForm, AnswerFormat
from llamaq.producer.answer_parts.answer_grammar import answer_grammar
from llamaq.producer.answer_parts.harmony_splitter import HarmonySplitter
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string"}), tool("stop")]
WEATHER = '{"name": "weather", "arguments": {"city": "Ulm"}}'
STOP = '{"name": "stop", "arguments": {}}'


@pytest.fixture(scope="module")
def sandbox(chat_vocab: Vocab) -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(chat_vocab)
    yield sandbox
    sandbox.close()


def allows(sandbox: GrammarSandbox, vocab: Vocab, grammar: str, text: str) -> bool:
    """Return whether a grammar allows the text as a whole answer, in tokens of one byte."""
    pieces = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    return allows_tokens(sandbox, vocab, grammar, [pieces[bytes([byte])] for byte in text.encode()])


def allows_tokens(sandbox: GrammarSandbox, vocab: Vocab, grammar: str, tokens: list[int]) -> bool:
    """Return whether a grammar allows the tokens as a whole answer."""
    compiled = sandbox.check(JobParams(lark=grammar)).text
    constraint = ConstraintTokenizer(vocab).compile(compiled)
    try:
        constraint.accept(tokens)
    except JobRejected:
        return False
    return any(token in constraint.allowed_tokens() for token in vocab.end_tokens)


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}},
    "$defs": {"b": {"type": "object", "properties": {"c": {"type": "integer"}}}},
}
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
BASED = {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {"type": "integer"}}}], "$defs": {"a": CITY}}


def having(schema: dict[str, Any], **keywords: Any) -> dict[str, Any]:
    """Return the schema of an object with a property `a`."""
    return {"type": "object", "properties": {"a": schema}, **keywords}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (CITY, '{"city": "Ulm"}', '{"city": "Ulm", "zip": 1}'),
        (NESTED, '{"a": [{"c": 1}, null]}', '{"a": [{"c": 1, "d": 2}]}'),
        (CITY | {"additionalProperties": True}, '{"city": "Ulm", "zip": 1}', "[]"),
        (CITY | {"additionalProperties": {"type": "integer"}}, '{"zip": 1}', '{"zip": "1"}'),
        (CITY | {"required": ["zip"]}, '{"city": "Ulm", "zip": 1}', "{}"),
        ({"type": "object"}, '{"zip": 1}', "1"),
        (BASED, '{"city": "Ulm", "b": 1}', '{"b": "1"}'),
        ({**CITY, "anyOf": [{"required": ["zip"]}, {"required": ["city"]}]}, '{"zip": 1}', "{}"),
        (having({"allOf": [{"enum": [1]}]}), '{"a": 1}', '{"a": 1, "b": 1}'),
        (having({"allOf": [CITY]}), '{"a": {"city": "Ulm"}}', '{"a": {"zip": 1}}'),
        (having({"allOf": [CITY, having({})]}), '{"a": {"city": "Ulm", "a": 1}}', '{"a": {}, "b": 1}'),
        (having({"anyOf": [CITY], "required": ["zip"]}), '{"a": {"city": "Ulm", "zip": 1}}', '{"a": {"city": "Ulm"}}'),
        (having({"const": {"allOf": 1}}), '{"a": {"allOf": 1}}', '{"b": 1}'),
        ({"properties": {"allOf": CITY}}, '{"allOf": {"city": "Ulm"}}', '{"allOf": {"zip": 1}}'),
        ({"properties": {"properties": {}, "$ref": {}}}, '{"properties": 1, "$ref": 2}', '{"zip": 1}'),
        ({"type": "object", "additionalProperties": CITY}, '{"x": {"city": "Ulm"}}', '{"x": {"zip": 1}}'),
        ({"type": "object", "patternProperties": {"^x": CITY}}, '{"x": {"city": "Ulm"}}', '{"x": {"zip": 1}}'),
        (having(CITY, patternProperties={"^a": having({})}), '{"a": {"city": "Ulm", "a": 1}}', '{"b": 1}'),
        (CITY | {"required": ["city"], "minProperties": 2}, '{"city": "Ulm", "zip": 1}', '{"city": "Ulm"}'),
    ],
)
def test_arguments_have_only_the_properties_that_the_tool_names(
    sandbox: GrammarSandbox, chat_vocab: Vocab, schema: dict[str, Any], good: str, bad: str
) -> None:
    named = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = answer_grammar(AnswerForm(format=AnswerFormat.JSON, has_tools=True), named)
    assert allows(sandbox, chat_vocab, grammar, f'{{"name": "f", "arguments": {good}}}')
    assert not allows(sandbox, chat_vocab, grammar, f'{{"name": "f", "arguments": {bad}}}')


@pytest.mark.parametrize(
    ("answer_format", "good", "only_parallel", "bad"),
    [
        (
            AnswerFormat.HERMES,
            f"<tool_call>\n{WEATHER}\n</tool_call>",
            f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>",
            '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
        ),
        (AnswerFormat.GLM, f"<tool_call>\n{STOP}\n</tool_call>", None, "<tool_call>stop\n</tool_call>"),
        (AnswerFormat.MISTRAL, f"[TOOL_CALLS][{STOP}]", f"[TOOL_CALLS][{STOP},{WEATHER}]", "[TOOL_CALLS][]"),
        (AnswerFormat.JSON, WEATHER, None, '{"name": "other", "arguments": {}}'),
        (AnswerFormat.LLAMA3, STOP.replace("arguments", "parameters"), None, STOP),
    ],
)
def test_a_grammar_allows_calls_of_the_tools_only(
    sandbox: GrammarSandbox,
    chat_vocab: Vocab,
    answer_format: AnswerFormat,
    good: str,
    only_parallel: str | None,
    bad: str,
) -> None:
    form = AnswerForm(format=answer_format, has_tools=True)
    several, single = (answer_grammar(form, TOOLS, parallel=parallel) for parallel in (True, False))
    for grammar in (several, single):
        assert allows(sandbox, chat_vocab, grammar, good)
        assert not allows(sandbox, chat_vocab, grammar, bad)
        assert not allows(sandbox, chat_vocab, grammar, "Hello")
    if only_parallel is not None:
        assert allows(sandbox, chat_vocab, several, only_parallel)
        assert not allows(sandbox, chat_vocab, single, only_parallel)


REASONING = AnswerForm(format=AnswerFormat.HERMES, has_tools=True, reasoning_open="<think>", reasoning_close="</think>")
CALL = f"<tool_call>\n{STOP}\n</tool_call>"


def test_reasoning_comes_before_a_demanded_call(sandbox: GrammarSandbox, chat_vocab: Vocab) -> None:
    own = answer_grammar(REASONING, TOOLS)
    assert allows(sandbox, chat_vocab, own, CALL)
    assert allows(sandbox, chat_vocab, own, f"<think>\nWell <x>\n</think>\n\n{CALL}")
    assert not allows(sandbox, chat_vocab, own, f"Well</think>{CALL}")
    opened = answer_grammar(REASONING.after("<think>\n"), TOOLS)
    assert allows(sandbox, chat_vocab, opened, f"Well</think>\n\n{CALL}")
    assert not allows(sandbox, chat_vocab, opened, CALL)
    closed = answer_grammar(REASONING.after("<think>\n\n</think>\n\n"), TOOLS)
    assert allows(sandbox, chat_vocab, closed, CALL)
    assert not allows(sandbox, chat_vocab, closed, f"<think>Well</think>{CALL}")


def test_content_of_a_schema_may_be_a_call_instead(sandbox: GrammarSandbox, chat_vocab: Vocab) -> None:
    grammar = answer_grammar(REASONING, TOOLS, {"$ref": "#/$defs/One", "$defs": {"One": {"const": 1}}})
    for good in ("1", CALL, "<think>Well</think>1", f"<think>Well</think>\n{CALL}"):
        assert allows(sandbox, chat_vocab, grammar, good), good
    for bad in ("2", f"1{CALL}", "Well"):
        assert not allows(sandbox, chat_vocab, grammar, bad), bad


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize("answer_format", [AnswerFormat.JSON, AnswerFormat.LLAMA3])
def test_content_of_a_schema_with_a_name_is_no_call(
    sandbox: GrammarSandbox, chat_vocab: Vocab, answer_format: AnswerFormat
) -> None:
    form = AnswerForm(format=answer_format, has_tools=True)
    grammar = answer_grammar(form, TOOLS, PERSON)
    person, call = '{"name": "Alice", "age": 30}', WEATHER
    if answer_format is AnswerFormat.LLAMA3:
        call = call.replace("arguments", "parameters")
    for answer, expected in ((person, [Content(person)]), (call, [CallStarted(0, "weather")])):
        assert allows(sandbox, chat_vocab, grammar, answer)
        splitter = form.splitter()
        parts = [part for character in answer for part in splitter.feed(character)] + splitter.finish()
        assert [part for part in parts if not isinstance(part, CallArguments)] == expected


def test_the_schema_of_a_tool_may_have_definitions_and_little_white_space(
    sandbox: GrammarSandbox, chat_vocab: Vocab
) -> None:
    parameters = {"$defs": {"One": {"const": 1}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/One"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = answer_grammar(AnswerForm(has_tools=True), tools)
    assert allows(sandbox, chat_vocab, grammar, '{"name": "f", "arguments": {"a": 1}}')
    assert not allows(sandbox, chat_vocab, grammar, '{"name": "f", "arguments": {"a": 2}}')
    assert not allows(sandbox, chat_vocab, grammar, '{"name": "f", "arguments": {' + " " * 30 + '"a": 1}}')


@pytest.mark.parametrize(
    ("form", "answer", "tags"),
    [
        (REASONING, f"<think>Well <x>\n</think>\n\n{CALL}", ["<think>", "</think>", "<tool_call>", "</tool_call>"]),
        (REASONING.after("<think>\n"), f"</think>{CALL}", ["</think>", "<tool_call>", "</tool_call>"]),
        (AnswerForm(format=AnswerFormat.MISTRAL, has_tools=True), f"[TOOL_CALLS][{STOP}]", ["[TOOL_CALLS]"]),
    ],
)
def test_a_tag_that_is_a_token_is_not_spelled(
    sandbox: GrammarSandbox, tag_vocab: Vocab, form: AnswerForm, answer: str, tags: list[str]
) -> None:
    own = form.model_copy(update={"tag_tokens": tag_vocab.tag_tokens})
    grammar = answer_grammar(own, TOOLS)
    assert allows_tokens(sandbox, tag_vocab, grammar, tag_vocab.encode_part(answer, parse_special=True))
    for spelled in tags:
        before, after = answer.split(spelled)
        tokens = [tag_vocab.encode_part(text, parse_special=True) for text in (before, after)]
        assert not allows_tokens(sandbox, tag_vocab, grammar, [*tokens[0], *spelled.encode(), *tokens[1]]), spelled


def test_a_grammar_may_name_control_tokens(sandbox: GrammarSandbox, chat_vocab: Vocab) -> None:
    compiled = sandbox.check(JobParams(lark='start: <|im_start|> "x"')).text
    allowed = ConstraintTokenizer(chat_vocab).compile(compiled).allowed_tokens()
    assert [chat_vocab.piece_with_special(token) for token in allowed.ids().tolist()] == [b"<|im_start|>"]
    with pytest.raises(JobRejected, match=r"nothing"):
        sandbox.check(JobParams(lark='start: <|nothing|> "x"'))


def test_the_grammar_of_harmony_names_its_channels() -> None:
    grammar = answer_grammar(AnswerForm(format=AnswerFormat.HARMONY, has_tools=True), TOOLS, {"type": "null"})
    assert (
        'call0: <|channel|> "commentary to=functions.weather " <|constrain|> "json" <|message|> arguments0' in grammar
    )
    assert json.dumps(TOOLS[1]["function"]["parameters"])[:-1] in grammar
    assert 'content: <|channel|> "final" <|message|> object' in grammar


def test_the_grammar_of_harmony_continues_reasoning_that_the_prompt_has_begun() -> None:
    form = AnswerForm(format=AnswerFormat.HARMONY, has_tools=True)
    rest = 'TEXT <|end|> <|start|> "assistant"'
    assert f'start: (<|channel|> "analysis" <|message|> {rest})? rest\n' in answer_grammar(form, TOOLS)
    continued = form.model_copy(update={"starts_in_reasoning": True})
    assert f"start: {rest} rest\n" in answer_grammar(continued, TOOLS)


def test_the_name_of_a_tool_is_a_text_of_the_grammar() -> None:
    odd = 'a"b\\c'
    for answer_format in AnswerFormat:
        grammar = answer_grammar(AnswerForm(format=answer_format, has_tools=True), [tool(odd)])
        assert odd not in grammar
        assert json.dumps(odd)[1:-1] in grammar or json.dumps(json.dumps(odd))[1:-1] in grammar


@pytest.mark.parametrize("name", ["a b", "a<|message|>", "a\nb", ""])
def test_a_name_that_no_header_of_harmony_can_contain_is_an_invalid_request(name: str) -> None:
    form = AnswerForm(format=AnswerFormat.HARMONY, has_tools=True)
    with pytest.raises(InvalidRequest, match=r"tools\.1: this model's calls need a name without white space"):
        answer_grammar(form, [tool("weather"), tool(name)])


@pytest.mark.parametrize("name", ["weather", "functions.weather", "to=x", "a/b'{}", "größe", 'a"b'])
def test_the_splitter_of_harmony_returns_each_name_that_the_grammar_allows(name: str) -> None:
    grammar = answer_grammar(AnswerForm(format=AnswerFormat.HARMONY, has_tools=True), [tool(name)])
    header = f"commentary to=functions.{name} "
    assert json.dumps(header, ensure_ascii=False) in grammar
    assert CallStarted(0, name) in HarmonySplitter().feed(f"<|channel|>{header}<|constrain|>json<|message|>{{}}")


def test_a_schema_that_no_grammar_holds_is_an_invalid_request() -> None:
    form = AnswerForm(has_tools=True)
    with pytest.raises(InvalidRequest, match="`uniqueItems` at #/properties/a is not supported"):
        answer_grammar(form, [tool("f", a={"uniqueItems": True})])
    for malformed in ({"properties": 1}, {"properties": {"a": {}}, "required": 1}):
        answer_grammar(form, [tool("f", a=malformed)])  # the worker refuses it
    with pytest.raises(InvalidRequest, match="larger than 65536 bytes"):
        answer_grammar(form, [tool("f", a={"enum": ["x" * 70_000]})])
