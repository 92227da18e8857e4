"""Reads the tools of a request of the Responses API, which have no object `function` around their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.producer.openai_format.tools import ToolChoice, read_tools

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def read_response_tools(body: Mapping[str, Any]) -> ToolChoice:
    """Return the tools of a body, and which of them the answer must call.

    Raises:
        InvalidRequest: A field has a form that is not supported. The message names it.
    """
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, list):
        raise InvalidRequest("tools: a list of tools is required")
    functions = [_function_of(number, tool) for number, tool in enumerate(tools)]
    match choice:
        case {"type": "function", "name": str(name)}:
            choice = {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            names = {tool.get("name") for tool in allowed if isinstance(tool, Mapping)}
            functions = [tool for tool in functions if tool["function"].get("name") in names]
            if mode == "required" and not functions:
                raise InvalidRequest("tool_choice.tools: an answer must call one of these tools, but none is in tools")
            choice = mode
        case {"type": str(kind)}:
            raise InvalidRequest(f"tool_choice.type: llamaq supports function and allowed_tools, not {kind[:50]!r}")
    given = {"tools": functions, "tool_choice": choice, "parallel_tool_calls": body.get("parallel_tool_calls")}
    return read_tools(given)


def _function_of(number: int, tool: Any) -> dict[str, Any]:
    """Return a tool in the form of a chat."""
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"tools.{number}: an object is required")
    if tool.get("type") != "function":
        raise InvalidRequest(f"tools.{number}.type: llamaq supports function, not {str(tool.get('type'))[:50]!r}")
    fields = {name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None}
    return {"type": "function", "function": fields}
