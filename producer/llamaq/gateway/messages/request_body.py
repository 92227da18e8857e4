"""Reads the body of a request of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.messages.content_blocks import read_message, read_system
from llamaq.producer.openai_format.chat_messages import read_chat, with_effort
from llamaq.producer.openai_format.request_body import read_fields, read_flag, read_options, refuse_unsupported
from llamaq.producer.openai_format.tools import ToolChoice, read_tools

UNSUPPORTED = ("container", "mcp_servers")
"""Fields that only Anthropic's own servers can serve."""


@dataclass(frozen=True, slots=True)
class MessagesBody:
    """What the body of `/v1/messages` asks for."""

    model: str
    prompt: dict[str, Any]
    """The messages, and what else the chat template reads, as arguments of a job."""
    options: dict[str, Any]
    """The job options."""
    tool_choice: ToolChoice
    """The tools that the answer may call."""
    is_streamed: bool


def read_messages_body(body: Mapping[str, Any]) -> MessagesBody:
    """Return what the body of a request asks for.

    Raises:
        InvalidRequest: A field has a form that is not supported. The message names it.
    """
    refuse_unsupported(body)
    for name in UNSUPPORTED:
        if body.get(name):
            raise InvalidRequest(f"{name}: llamaq does not support it; leave it out")
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequest("model: the name of a model is required")
    choice = _read_tools(body)
    return MessagesBody(model, _read_prompt(body, choice), _read_options(body), choice, read_flag(body, "stream"))


def _read_prompt(body: Mapping[str, Any], choice: ToolChoice) -> dict[str, Any]:
    """Return the prompt. If the last message is the assistant's, the answer continues it."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: a list of messages is required")
    chat = read_system(body.get("system"))
    for number, message in enumerate(messages):
        chat += read_message(f"messages.{number}", message)
    kwargs = {"enable_thinking": _may_think(body)}
    kwargs |= with_effort(body.get("chat_template_kwargs"), read_fields(body, "output_config").get("effort"))
    return read_chat({"messages": chat, "tools": list(choice.tools) or None, "chat_template_kwargs": kwargs})


def _may_think(body: Mapping[str, Any]) -> bool:
    """Return whether the model is asked to reason. In Anthropic's API, reasoning is off unless the request turns it
    on.
    """
    thinking = read_fields(body, "thinking")
    match thinking.get("type", "disabled"):
        case "enabled" | "adaptive":
            return True
        case "disabled":
            return False
    raise InvalidRequest("thinking.type: enabled, adaptive or disabled is required")


def _read_budget(body: Mapping[str, Any]) -> int | None:
    """Return the largest number of tokens of reasoning. None: no limit."""
    thinking = read_fields(body, "thinking")
    budget = thinking.get("budget_tokens") if thinking.get("type") == "enabled" else None
    if budget is not None and (type(budget) is not int or budget < 0):
        raise InvalidRequest("thinking.budget_tokens: a number of tokens is required")
    return budget


def _read_options(body: Mapping[str, Any]) -> dict[str, Any]:
    user = read_fields(body, "metadata").get("user_id")
    output = read_fields(body, "output_config").get("format") or body.get("output_format")
    renamed = {"user": user, "reasoning_budget": _read_budget(body), **body, "response_format": output}
    return read_options({name: value for name, value in renamed.items() if name != "metadata"})


def _read_tools(body: Mapping[str, Any]) -> ToolChoice:
    tools, choice = body.get("tools") or [], read_fields(body, "tool_choice")
    if not isinstance(tools, list):
        raise InvalidRequest("tools: a list of tools is required")
    functions = [_function_of(number, tool) for number, tool in enumerate(tools)]
    match choice.get("type", "auto"):
        case "auto" | "none" as kind:
            wanted: Any = kind
        case "any":
            wanted = "required"
        case "tool" if isinstance(choice.get("name"), str):
            wanted = {"type": "function", "function": {"name": choice["name"]}}
        case _:
            raise InvalidRequest("tool_choice.type: auto, any, none, or tool with a name is required")
    parallel = not read_flag(choice, "disable_parallel_tool_use")
    return read_tools({"tools": functions, "tool_choice": wanted, "parallel_tool_calls": parallel})


def _function_of(number: int, tool: Any) -> dict[str, Any]:
    """Return a tool in the form of a chat."""
    match tool:
        case {"type": str(kind)} if kind != "custom":
            raise InvalidRequest(f"tools.{number}.type: llamaq supports custom, not {kind[:50]!r}")
        case {"name": str(name), "input_schema": Mapping() as schema}:
            described = {"description": tool["description"]} if tool.get("description") else {}
            return {"type": "function", "function": {"name": name, **described, "parameters": dict(schema)}}
    raise InvalidRequest(f"tools.{number}: a name and an object as input_schema are required")
