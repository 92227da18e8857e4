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
            names = {
                flat_name(tool.get("namespace"), tool.get("name")) for tool in allowed if isinstance(tool, Mapping)
            }
            functions = [tool for tool in functions if tool["function"].get("name") in names]
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
        case {"type": "function"}:
            fields = {name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None}
            if "name" in fields:
                fields["name"] = flat_name(namespace, fields["name"])
            yield {"type": "function", "function": fields}
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


def flat_name(namespace: Any, name: Any) -> Any:
    """Return the name under which the model knows a function. A name that is no text is returned as it is."""
    if not isinstance(name, str) or not isinstance(namespace, str) or namespace in ("", ROOT_NAMESPACE):
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def _name_of(choice: Any) -> Any:
    """Return the flat name of a function that a `tool_choice` names."""
    return flat_name(choice.get("namespace"), choice.get("name")) if isinstance(choice, Mapping) else None


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
