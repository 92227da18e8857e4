"""The formats in which models write reasoning and tool calls, and how a chat template shows the format of its model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from pydantic import Field

from llamaq.common.protocol import answer_tags
from llamaq.common.protocol.wire_model import WireModel
from llamaq.producer.answer_parts.answer_splitter import AnswerSplitter
from llamaq.producer.answer_parts.harmony_splitter import HarmonySplitter
from llamaq.producer.answer_parts.tagged_splitter import TaggedSplitter, Tags
from llamaq.producer.answer_parts.xml_call import LITERALS, OPEN, TEXTS, GlmCall, XmlCall, parameters_of


class AnswerFormat(StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    """`<tool_call>OBJECT</tool_call>`: Hermes, Qwen."""
    XML = "xml"
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""
    GLM = "glm"
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5."""
    LLAMA3 = "llama3"
    """The answer is an object, or follows `<|python_tag|>`: Llama 3."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS]` before a list of objects, or before NAME`[ARGS]`OBJECT: Mistral. NAME may have `[CALL_ID]`ID."""
    HARMONY = "harmony"
    """Messages in channels: gpt-oss."""
    JSON = "json"
    """The answer is an object. For models whose chat template names no format."""


_MARKS = {
    AnswerFormat.HARMONY: answer_tags.CHANNEL,
    AnswerFormat.XML: OPEN,
    AnswerFormat.GLM: "<arg_key>",
    AnswerFormat.HERMES: answer_tags.CALL_OPEN,
    AnswerFormat.MISTRAL: answer_tags.MISTRAL_CALLS,
    AnswerFormat.LLAMA3: answer_tags.PYTHON_TAG,
}
_LLAMA3 = re.compile(r"<\|start_header_id\|>.*ipython|ipython.*<\|start_header_id\|>", re.DOTALL)
_TAGS = {
    AnswerFormat.HERMES: Tags(call_open=answer_tags.CALL_OPEN, call_close=answer_tags.CALL_CLOSE, call_separators="^{"),
    AnswerFormat.XML: Tags(
        call_open=answer_tags.CALL_OPEN, call_close=answer_tags.CALL_CLOSE, call_separators="^{<", xml_call=XmlCall
    ),
    AnswerFormat.GLM: Tags(
        call_open=answer_tags.CALL_OPEN, call_close=answer_tags.CALL_CLOSE, call_separators="^{<", xml_call=GlmCall
    ),
    AnswerFormat.MISTRAL: Tags(
        call_open=answer_tags.MISTRAL_CALLS, arguments_open=answer_tags.MISTRAL_ARGUMENTS, call_separators=r"\s[\],"
    ),
    AnswerFormat.LLAMA3: Tags(call_open=answer_tags.PYTHON_TAG, call_separators=r"\s;", starts_with_call=True),
    AnswerFormat.JSON: Tags(call_separators=r"\s[\],", starts_with_call=True),
}
HARMONY_REASONING = (f"{answer_tags.CHANNEL}analysis{answer_tags.MESSAGE}", answer_tags.END)
_REASONING = (
    (answer_tags.THINK_OPEN, answer_tags.THINK_CLOSE),
    (answer_tags.MISTRAL_THINK_OPEN, answer_tags.MISTRAL_THINK_CLOSE),
)


class AnswerForm(WireModel):
    """How one answer is written. A splitter needs no other data, so a stored answer can be split at any time."""

    format: AnswerFormat = Field(AnswerFormat.JSON, description="How the model writes tool calls.")
    has_tools: bool = Field(False, description="Whether the answer may call tools.")
    is_parallel: bool = Field(True, description="Whether the answer may have several calls, or only one.")
    text_parameters: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="For calls in XML: the parameters of each tool whose values are texts."
    )
    literal_parameters: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="For calls in XML: those of them that may be `null`, and booleans."
    )
    reasoning_open: str = Field("", description="Tag before reasoning. Empty: reasoning is part of the content.")
    reasoning_close: str = Field("", description="Tag after reasoning.")
    starts_in_reasoning: bool = Field(False, description="Whether the prompt has begun the reasoning.")
    has_begun: bool = Field(False, description="Whether the prompt has a part of this reasoning.")
    has_reasoned: bool = Field(False, description="Whether the prompt has ended the reasoning.")
    tag_tokens: dict[str, int] = Field(
        default_factory=dict,
        description="The tags that are one token of the model's vocabulary, with the ids of these tokens. The same "
        "text in other tokens is no tag.",
    )

    @property
    def is_split(self) -> bool:
        """Whether the answer can have other parts than content."""
        return self.has_tools or bool(self.reasoning_open) or self.format is AnswerFormat.HARMONY

    @property
    def reasoning_tags(self) -> tuple[str, str] | None:
        """The texts before and after reasoning. None: the answer has no reasoning."""
        if self.format is AnswerFormat.HARMONY:
            return HARMONY_REASONING
        return (self.reasoning_open, self.reasoning_close) if self.reasoning_open else None

    def splitter(self) -> AnswerSplitter:
        """Return a splitter for one answer."""
        return AnswerSplitter(self._splitter_of_format(), is_parallel=self.is_parallel)

    def _splitter_of_format(self) -> HarmonySplitter | TaggedSplitter:
        if self.format is AnswerFormat.HARMONY:
            return HarmonySplitter(self.tag_tokens, starts_in_reasoning=self.starts_in_reasoning)
        tags = replace(
            _TAGS[self.format] if self.has_tools else Tags(),
            text_parameters=self.text_parameters,
            literal_parameters=self.literal_parameters,
            reasoning_open=self.reasoning_open,
            reasoning_close=self.reasoning_close,
        )
        return TaggedSplitter(
            tags, self.tag_tokens, starts_in_reasoning=self.starts_in_reasoning, has_begun=self.has_begun
        )

    def after(self, prompt: str) -> AnswerForm:
        """Return the form of an answer that follows this end of a prompt, which may have begun the reasoning."""
        _, opened, rest = prompt.rpartition(self.reasoning_open) if self.reasoning_open else ("", "", "")
        is_closed = bool(self.reasoning_close) and self.reasoning_close in rest
        begun = {"starts_in_reasoning": bool(opened) and not is_closed, "has_reasoned": bool(opened) and is_closed}
        return self.model_copy(update={**begun, "has_begun": bool(rest.strip()) and not is_closed})


CONTENT_ALONE = AnswerForm()
"""The form of an answer whose whole text is content."""


def detect_format(chat_template: str | None) -> AnswerFormat:
    """Return the format of a model by its chat template."""
    template = chat_template or ""
    if _LLAMA3.search(template):
        return AnswerFormat.LLAMA3
    return next((found for found, mark in _MARKS.items() if mark in template), AnswerFormat.JSON)


def form_of(
    chat_template: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    is_parallel: bool = True,
    may_reason: bool = True,
    tag_tokens: Mapping[str, int] = MappingProxyType({}),
) -> AnswerForm:
    """Return the form of the answers of a model, after a prompt that opens no reasoning.

    Args:
        chat_template: The model's chat template.
        tools: The tools of the request. Without tools, text in the form of a call is content.
        is_parallel: Whether an answer may have several calls.
        may_reason: Whether reasoning is a part of its own. False: it is content.
        tag_tokens: The tags that are one token of the model's vocabulary, with these tokens.
    """
    template = chat_template or ""
    opening, closing = next((pair for pair in _REASONING if may_reason and pair[1] in template), ("", ""))
    found = detect_format(template)
    typed = tools if found in (AnswerFormat.XML, AnswerFormat.GLM) else ()
    return AnswerForm(
        format=found,
        has_tools=bool(tools),
        is_parallel=is_parallel,
        text_parameters=parameters_of(typed, TEXTS),
        literal_parameters=parameters_of(typed, LITERALS),
        reasoning_open=opening,
        reasoning_close=closing,
        tag_tokens=dict(tag_tokens),
    )
