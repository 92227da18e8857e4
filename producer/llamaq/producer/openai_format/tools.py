"""Reads the tools of a chat, and builds the messages of answers that call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.producer.answer_parts.answer_format import AnswerSplitter, detect_format, make_splitter
from llamaq.producer.answer_parts.call_grammar import call_grammar
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning

REASONING_MARKS = ("</think>", "[/THINK]", "<|channel|>")
"""A chat template with one of these belongs to a model that reasons before it answers."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that an answer may call."""

    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the template shows. Empty: there are none."""
    demanded: tuple[dict[str, Any], ...] = ()
    """The answer must call one of these. Empty: the model decides."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""


def read_tools(body: Mapping[str, Any]) -> ToolChoice:
    """Return the tools of a body, and which of them the answer must call.

    Raises:
        InvalidRequest: A field has a form that is not supported. The message names it.
    """
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools or choice == "none":
        return ToolChoice()
    if not isinstance(tools, list):
        raise InvalidRequest("tools: a list of tools is required")
    names = [_name_of(number, tool) for number, tool in enumerate(tools)]
    match choice:
        case None | "auto":
            demanded = []
        case "required":
            demanded = tools
        case {"type": "function", "function": {"name": str(name)}}:
            demanded = [tool for tool, each in zip(tools, names, strict=True) if each == name]
            if not demanded:
                raise InvalidRequest(f"tool_choice: there is no tool {name[:100]!r}")
        case _:
            raise InvalidRequest("tool_choice: auto, none, required or a function is required")
    return ToolChoice(tuple(tools), tuple(demanded), body.get("parallel_tool_calls") is not False)


def _name_of(number: int, tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}} if isinstance(
            rest.get("parameters", {}), Mapping | None
        ):
            return name
    raise InvalidRequest(f"tools.{number}: a function with a name is required, and an object as its parameters")


def must_split(choice: ToolChoice, chat_template: str | None) -> bool:
    """Return whether answers have other parts than content."""
    return bool(choice.tools) or any(mark in (chat_template or "") for mark in REASONING_MARKS)


def tool_options(choice: ToolChoice, chat_template: str | None) -> dict[str, Any]:
    """Return the job options for answers that are split: the texts of control tokens, and a grammar for the calls."""
    options: dict[str, Any] = {"special": True}
    if choice.demanded:
        found = detect_format(chat_template)
        options["lark"] = call_grammar(found, choice.demanded, parallel=choice.is_parallel)
    return options


def splitter_of(choice: ToolChoice, chat_template: str | None) -> AnswerSplitter:
    """Return the splitter for one answer."""
    return make_splitter(chat_template, has_tools=bool(choice.tools))


def delta_of(part: Part) -> dict[str, Any]:
    """Return the `delta` of a chunk with one part."""
    match part:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallStarted(index, name, call_id):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_of(parts: list[Part]) -> dict[str, Any]:
    """Return the message with all parts of an answer. Without text, the content of a call is null."""
    calls: list[dict[str, Any]] = []
    content, reasoning = "", ""
    for part in parts:
        match part:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallStarted(_, name, call_id):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content.strip() else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
