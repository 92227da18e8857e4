"""Reads the tools of the Responses API: functions, alone or grouped in namespaces.

Codex groups the functions of an MCP server in a namespace. A chat template knows no namespaces, so the model gets each
function under a flat name, which begins with the namespace. The items of an answer have the namespace again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.producer.openai_format.tools import ToolChoice, read_tools

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
"""The fields of a tool, which has no object `function` around them."""
ROOT_NAMESPACE = "functions"
"""The namespace of functions that no other namespace has. Clients may leave it out."""
SUPPORTED = ("function", "namespace")


def usable_tools(body: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a body that a model can be given.

    Tools of other types, such as `web_search`, run on OpenAI's servers or have answers in free text. A model that does
    not get them cannot call them. Agents always offer some of them beside their functions, as Codex does.

    Raises:
        InvalidRequest: The tools are no list, or all are of other types.
    """
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise InvalidRequest("tools: a list of tools is required")
    usable = [tool for tool in tools if not _is_foreign(tool)]
    if tools and not usable:
        raise InvalidRequest(f"tools.0.type: llamaq supports function and namespace, not {tools[0]['type'][:50]!r}")
    return usable


def _is_foreign(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind not in SUPPORTED


def read_response_tools(body: Mapping[str, Any]) -> ToolChoice:
    """Return the tools of a body, and which of them the answer must call.

    Raises:
        InvalidRequest: A field has a form that is not supported. The message names it.
    """
    usable_tools(body)  # refuses what has no usable tool
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    functions = [each for number, tool in enumerate(tools) for each in _functions_of(f"tools.{number}", tool)]
    match choice:
        case {"type": "function", "name": str()}:
            choice = {"type": "function", "function": {"name": _name_of(choice)}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            names = {_name_of(tool) for tool in allowed}
            functions = [tool for tool in functions if tool["function"]["name"] in names]
            if mode == "required" and not functions:
                raise InvalidRequest("tool_choice.tools: an answer must call one of these tools, but none is in tools")
            choice = mode
        case {"type": str(kind)}:
            raise InvalidRequest(f"tool_choice.type: llamaq supports function and allowed_tools, not {kind[:50]!r}")
    given = {"tools": functions, "tool_choice": choice, "parallel_tool_calls": body.get("parallel_tool_calls")}
    return read_tools(given)


def _functions_of(place: str, tool: Any, namespace: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the functions of a tool in the form of a chat. A tool of another type has none."""
    match tool:
        case {"type": "function", "name": str(name)}:
            fields = {field: tool[field] for field in FUNCTION_FIELDS if tool.get(field) is not None}
            yield {"type": "function", "function": {**fields, "name": flat_name(namespace, name)}}
        case {"type": "function"}:
            raise InvalidRequest(f"{place}: a function with a name is required")
        case {"type": "namespace", "name": str(name), "tools": [*tools]} if namespace is None:
            for number, each in enumerate(tools):
                yield from _functions_of(f"{place}.tools.{number}", each, name)
        case {"type": "namespace"}:
            raise InvalidRequest(f"{place}: a namespace with a name and a list of tools is required")
        case {"type": str()}:
            pass
        case Mapping():
            raise InvalidRequest(f"{place}.type: llamaq supports function, not {str(tool.get('type'))[:50]!r}")
        case _:
            raise InvalidRequest(f"{place}: an object is required")


def flat_name(namespace: Any, name: str) -> str:
    """Return the name under which the model knows a function."""
    if not isinstance(namespace, str) or namespace in ("", ROOT_NAMESPACE):
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def _name_of(choice: Any) -> str | None:
    """Return the flat name of a function that a `tool_choice` names. None: it names none."""
    match choice:
        case {"name": str(name)}:
            return flat_name(choice.get("namespace"), name)
        case {"name": given} if given is not None:
            raise InvalidRequest("tool_choice: the name of a function must be a text")
    return None


def names_in_namespaces(tools: Any) -> dict[str, dict[str, str]]:
    """Return the fields `name` and `namespace` of a call, by the flat name of its function.

    Args:
        tools: The tools of a request. Functions without a namespace are not in the result.
    """
    return {
        flat_name(tool["name"], each["name"]): {"name": each["name"], "namespace": tool["name"]}
        for tool in (tools if isinstance(tools, Sequence) else ())
        if isinstance(tool, Mapping) and tool.get("type") == "namespace"
        for each in tool["tools"]
        if each.get("type") == "function"
    }
