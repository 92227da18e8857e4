"""Functions, the form of tools in older requests of the OpenAI API."""

from __future__ import annotations

from typing import Any

import pytest

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.completions.function_call import as_function_call
from llamaq.producer.openai_format.chat_messages import read_messages
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import read_body

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {"name": "weather", "description": "", "parameters": {"type": "object"}}
NOW: dict[str, Any] = {"name": "now"}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, NOW)]


@pytest.mark.parametrize(
    ("choice", "demanded"),
    [({}, []), ({"function_call": "auto"}, []), ({"function_call": {"name": "now"}}, TOOLS[1:])],
)
def test_functions_are_tools_of_which_an_answer_calls_one(choice: dict[str, Any], demanded: list[Any]) -> None:
    body = read_body(Endpoint.CHAT, {"messages": HELLO, "functions": [WEATHER, NOW], **choice})
    assert body.has_functions
    assert body.jobs[0]["tools"] == list(body.tool_choice.tools) == TOOLS
    assert list(body.tool_choice.demanded) == demanded
    assert not body.tool_choice.is_parallel


def test_no_function_is_called_if_the_request_says_so() -> None:
    body = read_body(Endpoint.CHAT, {"messages": HELLO, "functions": [WEATHER], "function_call": "none"})
    assert body.tool_choice.tools == ()
    assert "tools" not in body.jobs[0]
    assert not read_body(Endpoint.CHAT, {"messages": HELLO, "functions": [], "function_call": None}).has_functions


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"functions": {"name": "now"}}, "functions: a list"),
        ({"functions": ["now"]}, r"functions\.0: a function with a name"),
        ({"functions": [NOW, {"name": "x", "parameters": 1}]}, r"functions\.1: "),
        ({"functions": [NOW], "tools": TOOLS}, "functions: the request also has tools"),
        ({"functions": [NOW], "function_call": {"name": "weather"}}, "function_call: "),
        ({"functions": [NOW], "function_call": "required"}, "function_call: "),
        ({"function_call": {"name": "now"}}, "function_call: "),
    ],
)
def test_functions_of_a_wrong_form_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{complaint}"):
        read_body(Endpoint.CHAT, {"messages": HELLO, **fields})


def test_a_text_is_not_completed_with_functions() -> None:
    with pytest.raises(InvalidRequest, match=r"^functions: llamaq does not support it"):
        read_body(Endpoint.COMPLETIONS, {"prompt": "x", "functions": [NOW]})


def test_the_result_of_a_function_answers_its_call() -> None:
    call = {"name": "now", "arguments": "{}"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "now", "content": "noon"},
        {"role": "assistant", "content": "It is noon.", "function_call": None},
    ]
    assert read_messages({"messages": messages})[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "000000001", "type": "function", "function": call}],
        },
        {"role": "tool", "name": "now", "content": "noon", "tool_call_id": "000000001"},
        {"role": "assistant", "content": "It is noon."},
    ]


def test_a_call_of_a_function_has_no_id_in_messages_and_in_deltas() -> None:
    function = {"name": "now", "arguments": "{}"}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    assert as_function_call(message) == {"role": "assistant", "content": None, "function_call": function}
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    assert as_function_call(delta) == {"function_call": {"arguments": "{"}}
    assert as_function_call({"content": "text"}) == {"content": "text"}
