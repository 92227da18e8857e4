"""Reads the tools of a chat, and builds the messages of answers that call them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.producer.answer_parts.answer_format import AnswerForm
from llamaq.producer.answer_parts.answer_grammar import answer_grammar
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Part, Reasoning
from llamaq.producer.option_synonyms import SYNONYMS


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
    body = with_allowed_tools(body)
    tools, choice = body.get("tools"), body.get("tool_choice")
    if choice == "none":
        return ToolChoice()
    if not tools:
        if choice not in (None, "auto"):  # an answer in free text is not what the client has asked for
            raise InvalidRequest("tool_choice: an answer cannot call a tool, because the request allows no tools")
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
            raise InvalidRequest("tool_choice: auto, none, required, a function or allowed_tools is required")
    return ToolChoice(tuple(tools), tuple(demanded), body.get("parallel_tool_calls") is not False)


def with_tools_of_functions(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body that has tools in place of `functions`, the form that OpenAI's API had before it had tools.

    OpenAI's API still accepts this form, and programs such as Dify and promptfoo still have a mode for it.

    Raises:
        InvalidRequest: A field has a form that is not supported, or the body has tools too.
    """
    functions, choice = body.get("functions"), body.get("function_call")
    if not functions:
        return body
    if not isinstance(functions, list):
        raise InvalidRequest("functions: a list of functions is required")
    if body.get("tools"):
        raise InvalidRequest("functions: the request also has tools; give one of the two")
    tools = [{"type": "function", "function": function} for function in functions]
    names = [_name_of(number, tool, "functions") for number, tool in enumerate(tools)]
    match choice:
        case None | "auto" | "none":
            wanted = choice
        case {"name": str(name)} if name in names:
            wanted = {"type": "function", "function": {"name": name}}
        case _:
            raise InvalidRequest("function_call: auto, none, or an object with the name of a function is required")
    kept = {name: value for name, value in body.items() if name not in ("functions", "function_call")}
    return {**kept, "tools": tools, "tool_choice": wanted, "parallel_tool_calls": False}


def with_allowed_tools(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body that has only the tools that its `tool_choice` allows, with the mode as its `tool_choice`.

    A `tool_choice` without the type `allowed_tools` allows all tools.

    Raises:
        InvalidRequest: The allowed tools have a form that is not supported.
    """
    match body.get("tool_choice"):
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}}:
            tools = body.get("tools") or []
            if not isinstance(tools, list):
                raise InvalidRequest("tools: a list of tools is required")
            names = [_name_of(number, tool, "tool_choice.allowed_tools.tools") for number, tool in enumerate(allowed)]
            kept = [tool for number, tool in enumerate(tools) if _name_of(number, tool) in names]
            return {**body, "tools": kept, "tool_choice": mode}
        case {"type": "allowed_tools"}:
            raise InvalidRequest(
                "tool_choice.allowed_tools: the mode auto or required, and a list of tools, are required"
            )
    return body


def _name_of(number: int, tool: Any, field: str = "tools") -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}} if isinstance(
            rest.get("parameters", {}), Mapping | None
        ):
            return name
    raise InvalidRequest(f"{field}.{number}: a function with a name is required, and an object as its parameters")


FREE_CONSTRAINTS = ("grammar", "regex", "choice", "lark")
"""Constraints of the whole answer, which leave no room for reasoning."""


def has_free_constraint(job: Mapping[str, Any]) -> bool:
    """Return whether a constraint of the request describes the whole answer."""
    return any(job.get(name) for name in FREE_CONSTRAINTS)


def form_options(form: AnswerForm, choice: ToolChoice, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job options for answers of a form: the texts of control tokens, the tags of reasoning, and a grammar.

    If the answer must be a call, the grammar describes calls. Otherwise, if the request has a JSON schema, the grammar
    allows the reasoning first, and then either content that matches the schema or a call.
    """
    if not form.is_split:
        return {}
    options: dict[str, Any] = {"special": True}
    has_budget = any(SYNONYMS.get(name, name) == "reasoning_budget" for name in job)
    if has_budget and (tags := form.reasoning_tags):
        options |= {"reasoning_open": tags[0], "reasoning_close": tags[1]}
    schema = job.get("json_schema")
    if choice.demanded:
        grammar = answer_grammar(form, choice.demanded, parallel=choice.is_parallel)
    elif schema is not None:
        grammar = answer_grammar(form, choice.tools, schema, parallel=choice.is_parallel)
    else:
        return options
    return options | {"json_schema": None, "lark": grammar}


def call_id(job_id: str, index: int) -> str:
    """Return the id of a call of an answer. Every server computes the same one.

    The chat templates of Mistral's models refuse ids that are not nine letters or digits.
    """
    return hashlib.sha256(f"{job_id}/{index}".encode()).hexdigest()[:9]


def message_of(parts: Sequence[Part], job_id: str) -> dict[str, Any]:
    """Return the message with all parts of the answer of a job. Without text, the content of a call is null."""
    calls: list[dict[str, Any]] = []
    content, reasoning = "", ""
    for part in parts:
        match part:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                content += text
            case CallStarted(index, name):
                function = {"name": name, "arguments": ""}
                calls.append({"id": call_id(job_id, index), "type": "function", "function": function})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content.strip() else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
