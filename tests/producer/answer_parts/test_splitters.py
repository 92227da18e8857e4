from __future__ import annotations

import json
import re
import time
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaq.common.protocol.answer_tags import ANSWER_TAGS
from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE, AnswerForm, AnswerFormat, detect_format, form_of
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning
from llamaq.producer.answer_parts.xml_call import TEXTS, XmlCall, parameters_of
from llamaq.producer.openai_format.tools import call_id

QWEN = "{% if tools %}<tool_call>{% endif %}</think>"
LLAMA3 = "<|start_header_id|>ipython<|end_header_id|><|python_tag|>"
MISTRAL = "[TOOL_CALLS]"
HARMONY = "<|channel|>analysis"
PLAIN = "{{ messages }}"
XML = "<tool_call>\n<function="
GLM = "<tool_call>{function-name}\n<arg_key>"
GLM_ARGUMENTS = """<arg_key>city</arg_key>
<arg_value>1
2</arg_value>
<arg_key>days</arg_key>
<arg_value>[1]</arg_value>
"""
XML_CALLS = """I look.
<tool_call>
<function=weather>
<parameter=city>
1 <b>
2
</parameter>
<parameter=days>
[1]
</parameter>
<parameter=unit>
C
</parameter>
</function>
</tool_call>
<tool_call><function=stop></function></tool_call>"""
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
]
R1 = "<think></think>"


def joined(parts: list[Part]) -> list[tuple[str, ...]]:
    """Return the parts with neighbours of one kind joined, and calls as ("call", NAME, ARGUMENTS)."""
    found: list[tuple[str, ...]] = []
    for part in parts:
        match part:
            case CallStarted(index, name):
                assert index == sum(each[0] == "call" for each in found)
                found.append(("call", name, ""))
            case CallArguments(index, text):
                place = [number for number, each in enumerate(found) if each[0] == "call"][index]
                found[place] = ("call", found[place][1], found[place][2] + text)
            case Content(text) | Reasoning(text):
                kind = "content" if isinstance(part, Content) else "reasoning"
                if found and found[-1][0] == kind:
                    found[-1] = (kind, found[-1][1] + text)
                else:
                    found.append((kind, text))
    return found


TOKENS = {tag: number for number, tag in enumerate(ANSWER_TAGS)}


def split(
    template: str,
    pieces: list[str],
    *,
    has_tools: bool = True,
    tag_offsets: list[int] | None = None,
    is_early: bool = False,
) -> list[tuple[str, ...]]:
    """Return the parts of an answer.

    Args:
        template: The chat template.
        pieces: The pieces of the answer.
        has_tools: Whether the request has tools.
        tag_offsets: Where tokens begin that are tags. Each piece has those that begin in it. None: tags are texts.
        is_early: Whether the first piece has all offsets. The text of the other tags follows.
    """
    tag_tokens = {} if tag_offsets is None else TOKENS
    form = form_of(template, tools=TOOLS if has_tools else (), tag_tokens=tag_tokens)
    splitter = form.after("<|Assistant|><think>\n" if template == R1 else "").splitter()
    parts: list[Part] = []
    answer, start = "".join(pieces), 0
    for piece in pieces:
        end = len(answer) if is_early else start + len(piece)
        own = [offset for offset in tag_offsets or () if start <= offset < end and not (is_early and start)]
        parts += splitter.feed(piece, own)
        start += len(piece)
    parts += splitter.finish()
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    assert "".join(answer[first:last] for first, last in splitter.reasoning_spans).lstrip() == reasoning.lstrip()
    assert all(first < last for first, last in splitter.reasoning_spans)
    assert all(before[1] < after[0] for before, after in pairwise(splitter.reasoning_spans))
    return joined(parts)


def tag_places(answer: str) -> list[int]:
    """Return where the tags of an answer begin, without those inside the quoted arguments `ULM`."""
    hidden = answer.replace(ULM, "." * len(ULM))
    return [found.start() for found in re.finditer("|".join(map(re.escape, ANSWER_TAGS)), hidden)]


QUOTED_TAG = '{"name": "f", "arguments": {"x": "</tool_call>"}}'
ULM = '{"city": "Ulm } <tool_call> \\" </tool_call>", "days": [1, {"a": 2}]}'
OWN = f'{{"name": "weather", "arguments": {ULM}}}'
OTHER_ORDER = f'{{"arguments": {ULM}, "name": "weather"}}'
CALL = ("call", "weather", ULM)
ALICE = '{"name": "Alice", "age": 30}'
NAN = '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>'
INFINITE = NAN.replace("NaN", "1e999")

TAGGED: dict[str, tuple[str, str, list[tuple[str, ...]]]] = {
    "text": (QWEN, "Hello < world <tool", [("content", "Hello < world <tool")]),
    "reasoning": (QWEN, "<think>\nWell</think>\n\nYes", [("reasoning", "\nWell"), ("content", "Yes")]),
    "reasoning that the prompt opened": (R1, "Well</think>\n\nYes", [("reasoning", "Well"), ("content", "Yes")]),
    "hermes": (QWEN, f"Wait.<tool_call>\n{OWN}\n</tool_call>", [("content", "Wait."), CALL]),
    "hermes, white space": (QWEN, f" Wait. \n\n<tool_call>{OWN}</tool_call> \n", [("content", " Wait."), CALL]),
    "hermes, white space alone": (QWEN, " \n", [("content", " \n")]),
    "hermes, white space and no call": (
        QWEN,
        " \n<tool_call>x </tool_call> ",
        [("content", " \n<tool_call>x </tool_call> ")],
    ),
    "hermes, two": (QWEN, f"<tool_call>{OWN}</tool_call>\n<tool_call>{OWN}</tool_call>", [CALL, CALL]),
    "hermes, two in one tag": (
        QWEN,
        f'<tool_call>{OWN}}}\n{OWN} <tool_call>{OWN}{{"a": 1}}</tool_call> Done.',
        [CALL, CALL, CALL, ("content", '{"a": 1}</tool_call> Done.')],
    ),
    "hermes, a brace too many": (QWEN, f"<tool_call>{OWN}}}\n</tool_call> Done.", [CALL, ("content", "Done.")]),
    "hermes, cut off": (QWEN, f"<tool_call>{OWN[:40]}", [("call", "weather", OWN[33:40])]),
    "hermes, no object": (QWEN, "<tool_call>never</tool_call>", [("content", "<tool_call>never</tool_call>")]),
    "hermes, no call": (QWEN, '<tool_call>{"a": 1}</tool_call>!', [("content", '<tool_call>{"a": 1}</tool_call>!')]),
    **{
        f"hermes, a call after {bad!r}": (
            QWEN,
            f"{bad}\n<tool_call>\n{OWN}\n</tool_call>",
            [("content", bad), CALL],
        )
        for bad in (
            "<tool_call>\nget_weather\n</tool_call>",
            '<tool_call>say "hi</tool_call>',
            '<tool_call>{"name": "f"</tool_call>',
        )
    },
    "hermes, a call in a tag without an end": (
        QWEN,
        f"<tool_call>get_weather<tool_call>{OWN}</tool_call>",
        [("content", "<tool_call>get_weather"), CALL],
    ),
    "llama 3": (LLAMA3, OWN.replace("arguments", "parameters"), [CALL]),
    "llama 3, tag": (LLAMA3, f"<|python_tag|>{OWN}; {OWN}", [CALL, CALL]),
    "llama 3, text": (LLAMA3, 'See {"name": 1}', [("content", 'See {"name": 1}')]),
    "llama 3, tag and no arguments": (
        LLAMA3,
        '<|python_tag|>{"name": "stop"}; {"name": "stop"}',
        [("call", "stop", "{}"), ("call", "stop", "{}")],
    ),
    "llama 3, a list after a call": (LLAMA3, f'{OWN}[{{"name": "f"}}]', [CALL, ("content", '[{"name": "f"}]')]),
    "json, a number after a call": (PLAIN, f"{OWN}, 5", [CALL, ("content", "5")]),
    "json, an object with a name after a call": (PLAIN, f"{OWN}, {ALICE}", [CALL, ("content", ALICE)]),
    **{
        f"{name}, {answer}": (template, answer, [("content", answer)])
        for name, template in (("llama 3", LLAMA3), ("json", PLAIN))
        for answer in (ALICE, '{"age": 30, "name": "Alice"}')
    },
    **{
        f"{name}, {answer}": (template, answer, [CALL])
        for name, template in (("llama 3", LLAMA3), ("json", PLAIN))
        for own in (OWN, OTHER_ORDER)
        for answer in (own, own.replace("arguments", "parameters"))
    },
    "llama 3, other object": (LLAMA3, '{"answer": 42}', [("content", '{"answer": 42}')]),
    "hermes, a number that JSON does not have": (QWEN, NAN, [("content", NAN)]),
    "hermes, a number that Python does not have": (QWEN, INFINITE, [("content", INFINITE)]),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{OWN}, {OWN}]", [CALL, CALL]),
    "mistral, no name": (MISTRAL, "[TOOL_CALLS]a [TOOL_CALLS]", [("content", "[TOOL_CALLS]a [TOOL_CALLS]")]),
    "mistral, names": (
        MISTRAL,
        '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}',
        [("call", "a", '{"x": 1}'), ("call", "b", "{}")],
    ),
    "mistral, ids": (
        MISTRAL,
        '[TOOL_CALLS]a[CALL_ID]123456789[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]987654321[ARGS]{}',
        [("call", "a", '{"x": 1}'), ("call", "b", "{}")],
    ),
    "mistral, an id and no arguments": (
        MISTRAL,
        "Wait. [TOOL_CALLS]a[CALL_ID]123456789",
        [("content", "Wait. [TOOL_CALLS]a[CALL_ID]123456789")],
    ),
    "mistral, objects": (MISTRAL, f"[TOOL_CALLS]{OWN}[TOOL_CALLS] {OWN}", [CALL, CALL]),
    "mistral, no call": (
        MISTRAL,
        'A [TOOL_CALLS][{"a": 1},{"b": 2}',
        [("content", 'A [TOOL_CALLS][{"a": 1},{"b": 2}')],
    ),
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>Well<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        [("reasoning", "Well"), ("content", "Yes")],
    ),
    "harmony, tags in the reasoning": (
        HARMONY,
        "<|channel|>analysis<|message|>a <|message|><|channel|>b<|end|><|start|>assistant<|channel|>final<|message|>Y",
        [("reasoning", "a <|message|><|channel|>b"), ("content", "Y")],
    ),
    "harmony, reasoning in two messages": (
        HARMONY,
        "<|channel|>analysis<|message|>1<|end|><|start|>assistant<|channel|>analysis<|message|>2<|end|>",
        [("reasoning", "12")],
    ),
    "harmony, call": (
        HARMONY,
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ULM}<|call|>",
        [CALL],
    ),
    "mistral, no arguments": (
        MISTRAL,
        "[TOOL_CALLS]a[ARGS][TOOL_CALLS]b[ARGS] ",
        [("call", "a", "{}"), ("call", "b", " {}")],
    ),
    "harmony, no arguments": (
        HARMONY,
        "<|channel|>commentary to=functions.f <|message|><|end|><|start|>assistant<|channel|>final<|message|>Yes",
        [("call", "f", "{}"), ("content", "Yes")],
    ),
    "harmony, no arguments at the end": (HARMONY, " to=functions.f<|message|>", [("call", "f", "{}")]),
    **{
        f"hermes, the arguments {nothing}": (
            QWEN,
            f'<tool_call>{{"name": "f", "arguments": {nothing}}}</tool_call>',
            [("call", "f", "{}")],
        )
        for nothing in ('""', "null")
    },
    "xml": (
        XML,
        XML_CALLS,
        [
            ("content", "I look."),
            ("call", "weather", '{"city": "1 <b>\\n2", "days": [1], "unit": "C"}'),
            ("call", "stop", "{}"),
        ],
    ),
    "xml, two in one tag": (
        XML,
        "<tool_call><function=f></function>\n<function=g></function>\n</tool_call>",
        [("call", "f", "{}"), ("call", "g", "{}")],
    ),
    "xml, end tag in a value": (
        XML,
        "<tool_call><function=f>\n<parameter=a>\n1</function>2\n</parameter>\n</function>\n</tool_call> Done.",
        [("call", "f", '{"a": "1</function>2"}'), ("content", "Done.")],
    ),
    "xml, a tag in a value": (
        XML,
        "<tool_call><function=f><parameter=a><parameter=b></function>1</parameter></function></tool_call>",
        [("call", "f", '{"a": "<parameter=b></function>1"}')],
    ),
    "xml, without the end of a parameter": (
        XML,
        "<tool_call><function=f><parameter=a>1</function>\n</tool_call><tool_call><function=g></function></tool_call>",
        [("call", "f", '{"a": 1}'), ("call", "g", "{}")],
    ),
    "xml, without the ends of parameters": (
        XML,
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n2\n<parameter=b>\n[3]\n<parameter=c>\n<d>\n</function>\n</tool_call>",
        [("call", "f", '{"a": "1\\n2", "b": [3], "c": "<d>"}')],
    ),
    "xml, the tag of a parameter inside a line of a value": (
        XML,
        "<tool_call><function=f>\n<parameter=a>\n1 <parameter=b> 2\n</parameter>\n</function></tool_call>",
        [("call", "f", '{"a": "1 <parameter=b> 2"}')],
    ),
    "xml, cut off after an end tag in a value": (
        XML,
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2</function>",
        [("call", "f", '{"a": 1}')],
    ),
    "xml, numbers that JSON does not have": (
        XML,
        "<tool_call><function=f><parameter=a>NaN</parameter><parameter=b>[1e999]</parameter></function></tool_call>",
        [("call", "f", '{"a": "NaN", "b": "[1e999]"}')],
    ),
    "xml, cut off": (
        XML,
        "<tool_call><function=weather><parameter=city>Ulm</parameter><parameter=da",
        [("call", "weather", '{"city": "Ulm"}')],
    ),
    "glm": (
        GLM,
        f"I look.\n<tool_call>weather\n{GLM_ARGUMENTS}</tool_call>\n<tool_call>stop\n</tool_call>",
        [("content", "I look."), ("call", "weather", '{"city": "1\\n2", "days": [1]}'), ("call", "stop", "{}")],
    ),
    "glm, a number as a text": (
        GLM,
        "<tool_call>weather<arg_key>city</arg_key><arg_value>12</arg_value></tool_call>",
        [("call", "weather", '{"city": "12"}')],
    ),
    "glm, without lines": (
        GLM,
        "<tool_call>f<arg_key>a</arg_key><arg_value>{</arg_value></tool_call><tool_call>stop</tool_call>!",
        [("call", "f", '{"a": "{"}'), ("call", "stop", "{}"), ("content", "!")],
    ),
    "glm, without the end of a value": (
        GLM,
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>!",
        [("call", "f", '{"a": 1}'), ("content", "!")],
    ),
    "glm, tags in a value": (
        GLM,
        "<tool_call>f<arg_key>a</arg_key><arg_value><think>x</think> <tool_call>y</arg_value></tool_call>!",
        [("call", "f", '{"a": "<think>x</think> <tool_call>y"}'), ("content", "!")],
    ),
    "glm, cut off": (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>1", [("call", "f", "{}")]),
    "glm, cut off in the name": (GLM, "A <tool_call>weat", [("content", "A <tool_call>weat")]),
    "glm, no call": (
        GLM,
        "<tool_call> a b</tool_call> <tool_call></tool_call>",
        [("content", "<tool_call> a b</tool_call> <tool_call></tool_call>")],
    ),
    "glm, in JSON": (GLM, f"<tool_call>\n{OWN}\n</tool_call>", [CALL]),
    "hermes, a brace is missing": (QWEN, f"<tool_call>{OWN[:-1]}</tool_call> Done.", [CALL, ("content", "Done.")]),
    "hermes, quoted tag": (QWEN, f"<tool_call>{QUOTED_TAG}</tool_call>", [("call", "f", '{"x": "</tool_call>"}')]),
    "xml, no call": (XML, "<tool_call>never</tool_call>", [("content", "<tool_call>never</tool_call>")]),
    "xml, a call after no call": (
        XML,
        "<tool_call>never</tool_call>\n<tool_call><function=f></function></tool_call>",
        [("content", "<tool_call>never</tool_call>"), ("call", "f", "{}")],
    ),
    "xml, without the end of a call": (
        XML,
        "<tool_call><function=f><parameter=a>1</parameter></tool_call><tool_call><function=g></function></tool_call>",
        [("call", "f", '{"a": 1}'), ("call", "g", "{}")],
    ),
    "xml, in JSON": (XML, f"<tool_call>\n{OWN}\n</tool_call>", [CALL]),
    "json": (PLAIN, OWN, [CALL]),
    "json, text after an object": (
        PLAIN,
        '{"a": 1}\n\nSee [1], ok',
        [("content", '{"a": 1}\n\nSee [1], ok')],
    ),
    "json, text after a call": (PLAIN, f"{OWN},\nSee [1], ok", [CALL, ("content", "See [1], ok")]),
    "json, white space": (PLAIN, f" \n{OWN}", [CALL]),
    "json, white space and no call": (PLAIN, ' \n{"answer": 42} ', [("content", ' \n{"answer": 42} ')]),
    "json, reasoning before and after": (
        R1,
        f"Well</think>\n{OWN}<think>Ok</think>Bye",
        [("reasoning", "Well"), CALL, ("reasoning", "Ok"), ("content", "Bye")],
    ),
    **{
        f"hermes, no name: {name!r}": (
            QWEN,
            answer := f'<tool_call>{{"name": "{name}", "arguments": {{"x": 1}}}}</tool_call>',
            [("content", answer)],
        )
        for name in (r"a\q", "a\nb", r"\ud800")
    },
    "llama 3, no name": (
        LLAMA3,
        r'{"name": "\d", "parameters": {}}',
        [("content", r'{"name": "\d", "parameters": {}}')],
    ),
    "xml, half a surrogate pair": (
        XML,
        r'<tool_call><function=f><parameter=a>"\ud800"</parameter></function></tool_call>',
        [("call", "f", r'{"a": "\"\\ud800\""}')],
    ),
}

UNTAGGED: dict[str, tuple[str, str, list[tuple[str, ...]]]] = {
    "xml, untagged": (
        XML,
        "I'll look.\n\n<function=f>\n<parameter=a>\n*.md\n</parameter>\n</function>\n</tool_call>",
        [("content", "I'll look."), ("call", "f", '{"a": "*.md"}')],
    ),
    "xml, several untagged": (
        XML,
        "<function=f></function><function=g>\n</function>\n</tool_call>\n<tool_call><function=h></function></tool_call>",
        [("call", "f", "{}"), ("call", "g", "{}"), ("call", "h", "{}")],
    ),
    "xml, text after an untagged call": (
        XML,
        "<tool_call><function=f></function></tool_call>\n<function=g></function> </tool_call> Done. </tool_call>",
        [("call", "f", "{}"), ("call", "g", "{}"), ("content", "Done. </tool_call>")],
    ),
    "xml, untagged, without the end of a parameter": (
        XML,
        "<function=f><parameter=a>1</function></tool_call><function=g><parameter=a>1</function>",
        [("call", "f", '{"a": 1}'), ("call", "g", '{"a": 1}')],
    ),
    "xml, untagged, a tag in a value": (
        XML,
        "<function=f><parameter=a><tool_call>\n<function=b></function>.</parameter></function>",
        [("call", "f", '{"a": "<tool_call>\\n<function=b></function>."}')],
    ),
    **{
        f"xml, {quoted!r} is no call": (XML, quoted, [("content", quoted)])
        for quoted in (
            "Write <function=f>.",
            "<function=f> then <parameter=a> </parameter> </function> </tool_call>",
            "<function=f>\n<parameter=a>\n1\n</parameter>",
            "<function=f>\n<parameter=a>1</parameter></tool_call>",
            "<function=f> <function=",
            "<function=\n></function>",
            "<function=f><b></function>",
            "<function=></function>",
            f"<function={'f' * 100}></function>",
            "<function=f</function>",
        )
    },
    "xml, no call and then one": (
        XML,
        "Write <function=f> here \n<function=g></function>\n",
        [("content", "Write <function=f> here"), ("call", "g", "{}")],
    ),
}
"""Calls in XML whose opening tag the model has left out."""
CASES = TAGGED | UNTAGGED


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
