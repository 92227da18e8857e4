"""Bodies of `/v1/responses` that are refused, without a server."""

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
