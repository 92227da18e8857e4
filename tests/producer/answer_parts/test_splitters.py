from __future__ import annotations

import json
import time
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.split_answers import (
    CALL,
    CASES,
    GLM,
    HARMONY,
    LLAMA3,
    MISTRAL,
    OTHER_ORDER,
    OWN,
    PLAIN,
    QWEN,
    R1,
    TAGGED,
    TOKENS,
    TOOLS,
    ULM,
    XML,
    joined,
    split,
    tag_places,
)

from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE, AnswerForm, AnswerFormat, detect_format, form_of
from llamaq.producer.answer_parts.parts import CallStarted, Content, Part, Reasoning
from llamaq.producer.answer_parts.xml_call import TEXTS, XmlCall, parameters_of
from llamaq.producer.openai_format.tools import call_id


@pytest.mark.parametrize(("template", "answer", "expected"), CASES.values(), ids=CASES)
def test_an_answer_is_split_into_its_parts(template: str, answer: str, expected: list[tuple[str, ...]]) -> None:
    assert split(template, [answer]) == expected
    assert split(template, list(answer)) == expected, "character by character"


def calls_of(parts: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [part for part in parts if part[0] == "call"]


@pytest.mark.parametrize(("template", "answer", "expected"), CASES.values(), ids=CASES)
def test_without_parallel_calls_only_the_first_call_counts(
    template: str, answer: str, expected: list[tuple[str, ...]]
) -> None:
    form = form_of(template, tools=TOOLS, is_parallel=False)
    splitter = form.after("<|Assistant|><think>\n" if template == R1 else "").splitter()
    assert splitter is not None
    parts = [part for character in answer for part in splitter.feed(character)] + splitter.finish()
    assert calls_of(joined(parts)) == calls_of(expected)[:1]
    assert [part for part in joined(parts) if part[0] == "reasoning"] == [p for p in expected if p[0] == "reasoning"]


def test_some_answers_have_several_calls() -> None:
    assert sum(len(calls_of(expected)) > 1 for _, _, expected in CASES.values()) >= 5


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 200)))
def test_the_parts_do_not_depend_on_how_the_answer_arrives(name: str, cuts: list[int]) -> None:
    template, answer, expected = CASES[name]
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    assert split(template, [answer[a:b] for a, b in pairwise([*places, len(answer)])]) == expected


FRAGMENTS = (
    '{"name": "f", "arguments": {}}',
    "[TOOL_CALLS]",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    " ",
    "x",
)


@pytest.mark.parametrize("template", [QWEN, LLAMA3, MISTRAL, R1])
@pytest.mark.parametrize("has_tokens", [False, True])
def test_any_answer_has_the_same_parts_at_once_and_character_by_character(template: str, has_tokens: bool) -> None:
    for answer in map("".join, product(FRAGMENTS, repeat=3)):
        places = tag_places(answer) if has_tokens else None
        assert split(template, list(answer), tag_offsets=places) == split(template, [answer], tag_offsets=places)


XML_FRAGMENTS = (
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "<tool_call>", "</tool_call>"),
    *("<think>", "</think>", "\n", " x", "1", '{"name": "f", "arguments": {}}', "<function=", "<"),
)


@given(st.lists(st.sampled_from(XML_FRAGMENTS)), st.lists(st.integers(0, 200)), st.booleans())
def test_any_answer_in_xml_has_the_same_parts_in_any_pieces(
    fragments: list[str], cuts: list[int], has_tokens: bool
) -> None:
    answer = "".join(fragments)
    tag_offsets = tag_places(answer) if has_tokens else None
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    whole = split(XML + R1, [answer], tag_offsets=tag_offsets)
    assert split(XML + R1, list(answer), tag_offsets=tag_offsets) == whole
    assert split(XML + R1, [answer[a:b] for a, b in pairwise(places)], tag_offsets=tag_offsets) == whole


NO_CALLS = (
    '{"a": 1}',
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    " \n",
    "], x",
    '"',
)


@pytest.mark.parametrize("template", [QWEN, LLAMA3, MISTRAL, PLAIN, XML])
@pytest.mark.parametrize("has_tokens", [False, True])
def test_an_answer_without_a_call_is_content_from_its_first_to_its_last_character(
    template: str, has_tokens: bool
) -> None:
    for answer in map("".join, product(NO_CALLS, repeat=3)):
        parts = split(template, list(answer), tag_offsets=tag_places(answer) if has_tokens else None)
        if not calls_of(parts):
            assert parts == [("content", answer)]


SPELLED = {
    **{
        name: (template, answer)
        for name, (template, answer, _) in TAGGED.items()
        if template in (QWEN, XML, GLM, MISTRAL)
    },
    "harmony": CASES["harmony"][:2],
    "harmony, call": CASES["harmony, call"][:2],
    "harmony, recipient": (HARMONY, " to=functions.weather <|channel|>"),
}


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 200)), st.booleans())
def test_tags_that_are_tokens_are_found_by_their_offsets(name: str, cuts: list[int], is_early: bool) -> None:
    template, answer, expected = CASES[name]
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    pieces = [answer[a:b] for a, b in pairwise([*places, len(answer)])]
    assert split(template, pieces, tag_offsets=tag_places(answer), is_early=is_early) == expected


@pytest.mark.parametrize(("template", "answer"), SPELLED.values(), ids=SPELLED)
def test_tags_that_are_spelled_with_other_tokens_are_content(template: str, answer: str) -> None:
    assert split(template, [answer], tag_offsets=[]) == [("content", answer)]
    assert split(template, list(answer), tag_offsets=[]) == [("content", answer)]


REASONED = "^<tool_call>no^</tool_call> and ^<tool_call>{}^</tool_call> are no calls"
QUOTED = "I write <tool_call>{</tool_call> after <think>."
HARMONY_QUOTED = "Say <|end|><|start|>assistant<|channel|>final<|message|>."
HARMONY_ANSWER = (
    f"^<|channel|>analysis^<|message|>{HARMONY_QUOTED}^<|end|>^<|start|>assistant"
    '^<|channel|>commentary to=f ^<|constrain|>json^<|message|>{"a": "<|call|>"}^<|call|>'
)


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (QWEN, "^<think>Not </think> yet^</think>\n\nYes", [("reasoning", "Not </think> yet"), ("content", "Yes")]),
        (R1, "<think></think>^</think>Yes", [("reasoning", "<think></think>"), ("content", "Yes")]),
        (QWEN, f"{QUOTED}^<tool_call>{OWN}^</tool_call>!", [("content", QUOTED), CALL, ("content", "!")]),
        (MISTRAL, '^[TOOL_CALLS]a[TOOL_CALLS]^[ARGS]"[ARGS]"', [("call", "a[TOOL_CALLS]", '"[ARGS]"')]),
        (HARMONY, HARMONY_ANSWER, [("reasoning", HARMONY_QUOTED), ("call", "f", '{"a": "<|call|>"}')]),
        (HARMONY, "Hello ^<|message|>you", [("content", "Hello <|message|>you")]),
    ],
)
def test_an_answer_may_quote_its_tags(template: str, answer: str, expected: list[tuple[str, ...]]) -> None:
    assert_parts_of_marked(template, answer, expected)


def assert_parts_of_marked(template: str, answer: str, expected: list[tuple[str, ...]]) -> None:
    """Assert the parts of an answer in which ^ marks the tokens that are tags."""
    texts = answer.split("^")
    tag_offsets = list(accumulate(map(len, texts)))[:-1]
    assert split(template, ["".join(texts)], tag_offsets=tag_offsets) == expected
    assert split(template, list("".join(texts)), tag_offsets=tag_offsets) == expected


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (QWEN, f"^<think>A.\n^<tool_call>\n{OWN}\n^</tool_call>!", [("reasoning", "A.\n"), CALL, ("content", "!")]),
        (R1 + XML, "^<think>A^<tool_call><function=f></function>", [("reasoning", "A"), ("call", "f", "{}")]),
        (QWEN, f"^<think>{REASONED}^</think>Yes", [("reasoning", REASONED.replace("^", "")), ("content", "Yes")]),
        (
            QWEN,
            f"^<think>A ^<tool_call>^</tool_call> ^<tool_call>x{OWN}",
            [("reasoning", f"A <tool_call></tool_call> <tool_call>x{OWN}")],
        ),
        (QWEN, "^<think>A ^<tool_call> B^</think>Yes", [("reasoning", "A <tool_call> B"), ("content", "Yes")]),
        (
            QWEN,
            f"^<think>A ^<tool_call>B ^<tool_call>{{}}{OWN}[{{}}^</tool_call>Yes",
            [("reasoning", "A <tool_call>B <tool_call>{}"), CALL, ("content", "{}</tool_call>Yes")],
        ),
        (
            QWEN,
            f"^<think>A <tool_call>{OWN}</tool_call>^</think>B",
            [("reasoning", f"A <tool_call>{OWN}</tool_call>"), ("content", "B")],
        ),
    ],
)
def test_the_token_before_a_call_ends_the_reasoning(
    template: str, answer: str, expected: list[tuple[str, ...]]
) -> None:
    assert_parts_of_marked(template, answer, expected)


def test_only_what_may_be_the_token_of_a_tag_is_held_back() -> None:
    splitter = form_of(QWEN, tools=TOOLS, tag_tokens=TOKENS).splitter()
    assert splitter.feed("a <tool") == [Content("a <tool")], "no token of a tag begins here"
    assert splitter.feed("_call> <tool", [14]) == [Content("_call>")]
    assert splitter.feed('_call>{"name": "f", "arguments": {}}')[0] == CallStarted(0, "f")


def test_content_that_only_names_a_function_is_streamed() -> None:
    splitter = form_of(XML, tools=TOOLS).splitter()
    assert splitter.feed("Write <function=f>") == [Content("Write")]
    assert splitter.feed("\n<") == []
    assert joined(splitter.feed("b> <func")) == [("content", " <function=f>\n<b>")]
    assert joined(splitter.feed("tions> ")) == [("content", " <functions>")]


def test_the_fields_of_a_call_may_have_another_order() -> None:
    [(kind, name, arguments)] = split(QWEN, list(f"<tool_call>{OTHER_ORDER}</tool_call>"))
    assert (kind, name, json.loads(arguments)) == ("call", "weather", json.loads(ULM))


def test_arguments_are_streamed_as_they_arrive() -> None:
    splitter = form_of(QWEN, tools=TOOLS).splitter()
    seen = splitter.feed('<tool_call>{"name": "f", "arguments": {"a": "long')
    assert joined(seen) == [("call", "f", '{"a": "long')]


@pytest.mark.parametrize("template", [QWEN, LLAMA3, MISTRAL, PLAIN])
def test_without_tools_a_call_is_content(template: str) -> None:
    answer = f"<tool_call>[TOOL_CALLS]{OWN}"
    assert split(template, [answer], has_tools=False) == [("content", answer)]


def test_reasoning_can_stay_content() -> None:
    plain = form_of(QWEN, may_reason=False).splitter()
    assert [*plain.feed(""), *plain.feed("<think>a"), *plain.finish()] == [Content("<think>a")]
    assert plain.reasoning_spans == ()
    splitter = form_of(QWEN, tools=TOOLS, may_reason=False).splitter()
    assert splitter.feed("<think>a</think>b") == [Content("<think>a</think>b")]


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think>One</think>Two<think>Three", True),
    ],
)
def test_a_prompt_may_have_opened_the_reasoning(prompt: str, starts: bool) -> None:
    assert form_of(QWEN).after(prompt).starts_in_reasoning is starts
    assert CONTENT_ALONE.after(prompt) == CONTENT_ALONE


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, AnswerFormat.HERMES),
        (XML, AnswerFormat.XML),
        (GLM, AnswerFormat.GLM),
        (LLAMA3, AnswerFormat.LLAMA3),
        (MISTRAL, AnswerFormat.MISTRAL),
        (HARMONY, AnswerFormat.HARMONY),
        (PLAIN, AnswerFormat.JSON),
        (None, AnswerFormat.JSON),
    ],
)
def test_the_format_is_that_of_the_chat_template(template: Any, expected: AnswerFormat) -> None:
    assert detect_format(template) is expected


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"properties": {"a": {"type": "string"}, "b": {"enum": ["x"]}, "c": {"type": "integer"}}}, ("a", "b")),
        ({"properties": {"a": {"enum": ["x", 1]}, "b": True, "c": {"enum": []}}}, None),
        (
            {
                "properties": {
                    "a": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "b": {"type": ["string", "null"]},
                    "c": {"oneOf": [{"enum": ["x", None]}, {"type": "string"}]},
                    "d": {"type": ["string", "integer"]},
                    "e": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                    "f": {"type": "null"},
                    "g": {"anyOf": []},
                }
            },
            ("a", "b", "c"),
        ),
        ({"properties": [1]}, None),
        (None, None),
    ],
)
def test_a_schema_tells_which_values_are_texts(parameters: Any, expected: tuple[str, ...] | None) -> None:
    assert parameters_of([{"function": {"name": "f", "parameters": parameters}}], TEXTS).get("f") == expected


NULLABLE: Any = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (NULLABLE, "12345", '"12345"'),
        (NULLABLE, "null", "null"),
        (NULLABLE, "True", '"True"'),
        ({"type": ["string", "null"]}, "true", '"true"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "false", "false"),
        ({"type": ["boolean", "null"]}, "False", "false"),
        ({"type": ["boolean", "null"]}, "null", "null"),
        ({"type": ["string", "integer"]}, "True", '"True"'),
        ({"type": ["string", "integer"]}, "7", "7"),
        ({}, "True", '"True"'),
    ],
)
def test_the_schema_of_a_parameter_tells_how_its_value_is_read(schema: Any, text: str, expected: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    splitter = form_of(XML, tools=tools).splitter()
    answer = f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>"
    assert joined(splitter.feed(answer) + splitter.finish()) == [("call", "f", f'{{"a": {expected}}}')]


@pytest.mark.parametrize(
    "value",
    ["x" * 400_000, "<parameter=a>" * 30_000, "<parameter=" * 35_000 + "</parameter>", "\n<parameter=a>" * 30_000],
    ids=["text", "open parameters", "open names", "open parameters in lines"],
)
def test_the_time_to_read_a_call_in_xml_grows_with_its_length_alone(value: str) -> None:
    """Each token searched the whole text again, and each open parameter searched its end up to the end of the text."""
    call = XmlCall(0, {}, {})
    start_s = time.process_time()
    for character in f"<function=f><parameter=a>{value}":
        assert call.feed(character) == ([], "")
    assert call.finish() is not None
    assert time.process_time() - start_s < 5


def test_every_call_has_an_id_of_its_own_that_every_server_computes() -> None:
    ids = [call_id("q.0.1", 0), call_id("q.0.1", 1), call_id("q.0.2", 0)]
    assert len(set(ids)) == 3
    assert ids[0] == call_id("q.0.1", 0)
    assert all(each.isalnum() and len(each) == 9 for each in ids), "Mistral's chat templates refuse other ids"


@pytest.mark.parametrize(
    ("form", "answer", "expected"),
    [
        (
            form_of(HARMONY).model_copy(update={"starts_in_reasoning": True}),
            " then<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
            [Reasoning(" then"), Content("Yes")],
        ),
        (form_of(QWEN).after("<think>Well"), " then</think>\nYes", [Reasoning(" then"), Content("Yes")]),
        (form_of(QWEN).after("<think>\n"), "\nWell</think>", [Reasoning("Well")]),
    ],
)
def test_reasoning_that_the_prompt_has_begun_is_continued(form: AnswerForm, answer: str, expected: list[Part]) -> None:
    splitter = form.splitter()
    assert [*splitter.feed(answer), *splitter.finish()] == expected
