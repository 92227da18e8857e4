"""The formats in which models write reasoning and tool calls, and how a chat template tells which one it is."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Protocol

from llamaq.producer.answer_parts.harmony_splitter import HarmonySplitter
from llamaq.producer.answer_parts.parts import Part
from llamaq.producer.answer_parts.tagged_splitter import TaggedSplitter, Tags


class AnswerFormat(StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    """`<tool_call>OBJECT</tool_call>`: Hermes, Qwen."""
    LLAMA3 = "llama3"
    """The answer is an object, or follows `<|python_tag|>`: Llama 3."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS]` before a list of objects, or before NAME`[ARGS]`OBJECT: Mistral."""
    HARMONY = "harmony"
    """Messages in channels: gpt-oss."""
    JSON = "json"
    """The answer is an object. For models whose chat template names no format."""


class AnswerSplitter(Protocol):
    """Splits one answer into its parts."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that a further piece of the answer completes."""

    def finish(self) -> list[Part]:
        """Return the last parts, at the end of the answer."""


_MARKS = {
    AnswerFormat.HARMONY: "<|channel|>",
    AnswerFormat.HERMES: "<tool_call>",
    AnswerFormat.MISTRAL: "[TOOL_CALLS]",
    AnswerFormat.LLAMA3: "<|python_tag|>",
}
_LLAMA3 = re.compile(r"<\|start_header_id\|>.*ipython|ipython.*<\|start_header_id\|>", re.DOTALL)
_TAGS = {
    AnswerFormat.HERMES: Tags(call_open="<tool_call>", call_close="</tool_call>"),
    AnswerFormat.MISTRAL: Tags(call_open="[TOOL_CALLS]", arguments_open="[ARGS]", call_separators="[],"),
    AnswerFormat.LLAMA3: Tags(call_open="<|python_tag|>", call_separators=";", starts_with_call=True),
    AnswerFormat.JSON: Tags(call_separators="[],", starts_with_call=True),
}
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_OPENED = re.compile(r"add_generation_prompt(?:(?!endif).)*<think>(?:\\n|\s)*['\"]?\s*(?:\}\}|-%\}|%\})", re.DOTALL)
"""A generation prompt that ends with the opening tag of the reasoning."""


def detect_format(chat_template: str | None) -> AnswerFormat:
    """Return the format of a model by its chat template."""
    template = chat_template or ""
    if _LLAMA3.search(template):
        return AnswerFormat.LLAMA3
    return next((found for found, mark in _MARKS.items() if mark in template), AnswerFormat.JSON)


def make_splitter(chat_template: str | None, *, has_tools: bool, may_reason: bool = True) -> AnswerSplitter:
    """Return a splitter for one answer.

    Args:
        chat_template: The model's chat template.
        has_tools: Whether the request has tools. Without tools, text in the form of a call is content.
        may_reason: Whether reasoning is a part of its own. False: it is content.
    """
    template = chat_template or ""
    found = detect_format(template)
    if found is AnswerFormat.HARMONY:
        return HarmonySplitter()
    tags = _TAGS[found] if has_tools else Tags()
    pair = next((pair for pair in _REASONING if pair[1] in template), None) if may_reason else None
    if pair is None:
        return TaggedSplitter(tags)
    values = {name: getattr(tags, name) for name in Tags.__dataclass_fields__}
    with_reasoning = Tags(**values | {"reasoning_open": pair[0], "reasoning_close": pair[1]})
    return TaggedSplitter(with_reasoning, starts_in_reasoning=_OPENED.search(template) is not None)
