"""Answers of models in all formats, with the parts that they have, and how a test splits them."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from llamaq.common.protocol.answer_tags import ANSWER_TAGS
from llamaq.producer.answer_parts.answer_format import form_of
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning

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
