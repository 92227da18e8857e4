"""How bodies of `/v1/responses` are read, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.responses.request_body import read_response_body

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """Return the fields of a request that may call only the named tools."""
    tools = [{"type": "function", "name": name} for name in names]
    return {"input": "hi", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}}


@pytest.mark.parametrize("names", [(), ("whether",)])
def test_an_answer_cannot_be_required_to_call_no_tool(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"tool_choice\.tools"):
        read_response_body(allowed("required", *names))
    assert not read_response_body(allowed("auto", *names)).tool_choice.tools
    assert read_response_body(allowed("required", "weather")).tool_choice.tools


@pytest.mark.parametrize("value", [True, False, "3"])
def test_the_number_of_alternatives_is_a_number(value: object) -> None:
    with pytest.raises(InvalidRequest, match="a number as top_logprobs"):
        read_response_body({"input": "hi", "top_logprobs": value})
    assert read_response_body({"input": "hi", "top_logprobs": 3.0}).options["logprobs"] == 3
    assert "logprobs" not in read_response_body({"input": "hi", "top_logprobs": None}).options


HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
    },
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
]
"""Tools without a JSON schema that Codex offers beside its functions."""


def named(*tools: Any, **fields: Any) -> list[str]:
    """Return the names of the functions that the model gets."""
    choice = read_response_body({"input": "hi", "tools": list(tools), **fields}).tool_choice
    return [tool["function"]["name"] for tool in choice.demanded or choice.tools]


def test_tools_that_a_model_cannot_call_are_left_out_beside_functions() -> None:
    body = read_response_body({"input": "hi", "tools": [*HOSTED, TOOL]})
    assert [tool["function"]["name"] for tool in body.tool_choice.tools] == ["weather"]
    assert body.shown["tools"] == [TOOL]
    with pytest.raises(
        InvalidRequest, match=r"tools\.0\.type: llamaq supports function and namespace, not 'web_search'"
    ):
        read_response_body({"input": "hi", "tools": HOSTED})
    with pytest.raises(InvalidRequest, match=r"tool_choice\.type"):
        read_response_body({"input": "hi", "tools": [*HOSTED, TOOL], "tool_choice": {"type": "web_search"}})


def test_functions_in_namespaces_get_flat_names() -> None:
    group = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [TOOL, HOSTED[1]]}
    choice = {"type": "function", "name": "weather", "namespace": "mcp__files"}
    allowed_one = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    assert named(TOOL, group) == ["weather", "mcp__files__weather"]
    assert named({**group, "name": "mcp__files__"}) == ["mcp__files__weather"]
    assert named({**group, "name": "functions"}) == ["weather"]
    assert named(TOOL, group, tool_choice=choice) == ["mcp__files__weather"]
    assert named(TOOL, group, tool_choice=allowed_one) == ["mcp__files__weather"]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "namespace", "name": "x"}, r"tools\.0: a namespace"),
        ({"type": "namespace", "name": "x", "tools": [1]}, r"tools\.0\.tools\.0: an object"),
        ({"type": "namespace", "name": "x", "tools": [{"type": "namespace", "name": "y", "tools": []}]}, "namespace"),
        ({"type": "namespace", "name": "x", "tools": [{"type": "function"}]}, "a function with a name"),
        ({"type": "namespace", "name": "x", "tools": [{"type": "function", "name": ["f"]}]}, "a function with a name"),
        ({"type": "function", "name": ["f"]}, "a function with a name"),
        ({"name": "x"}, r"tools\.0\.type: llamaq supports function"),
        (1, r"tools\.0: an object"),
    ],
)
def test_a_tool_that_cannot_be_read_is_named(tool: Any, message: str) -> None:
    for choice in ("auto", "none", {"type": "allowed_tools", "mode": "auto", "tools": []}):
        with pytest.raises(InvalidRequest, match=message):
            read_response_body({"input": "hi", "tools": [tool], "tool_choice": choice})


def test_the_name_of_an_allowed_tool_is_a_text() -> None:
    body = allowed("auto", "weather")
    body["tool_choice"]["tools"] += [{"type": "web_search"}, {"type": "web_search", "name": None}]
    assert len(read_response_body(body).tool_choice.tools) == 1
    body["tool_choice"]["tools"].append({"type": "function", "name": ["weather"]})
    with pytest.raises(InvalidRequest, match="tool_choice: the name of a function must be a text"):
        read_response_body(body)


def test_a_call_of_a_function_in_a_namespace_has_its_flat_name_in_the_prompt() -> None:
    call = {"type": "function_call", "call_id": "c", "namespace": "mcp__files", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    (message, _) = read_response_body({"input": [call, output]}).messages
    assert message["tool_calls"][0]["function"]["name"] == "mcp__files__weather"
