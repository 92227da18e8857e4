"""How a body of Anthropic's API is read. The worker and the anthropic package take part in tests/e2e."""

from __future__ import annotations

from typing import Any

import pytest

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.messages.request_body import MessagesBody, read_messages_body

USER: Any = {"role": "user", "content": "Hello"}
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}


def read(*messages: Any, **fields: Any) -> MessagesBody:
    return read_messages_body({"model": "m", "messages": [USER, *messages], **fields})


def test_blocks_become_messages_of_a_chat() -> None:
    answer = [
        {"type": "thinking", "thinking": "Well", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
    ]
    result = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "20"}]},
        {"type": "text", "text": "And you?"},
    ]
    body = read({"role": "assistant", "content": answer}, {"role": "user", "content": result}, system="Be kind.")
    function = {"name": "f", "arguments": {"a": 1}}
    assert body.prompt["messages"] == [
        {"role": "system", "content": "Be kind."},
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Well",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "20"},
        {"role": "user", "content": "And you?"},
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"is_error": True}, "Error"),
        ({"is_error": True, "content": []}, "Error"),
        ({"is_error": True, "content": "\n"}, "Error"),
        ({"is_error": True, "content": "no such file"}, "no such file"),
        ({"is_error": False}, ""),
        ({}, ""),
    ],
)
def test_an_error_of_a_tool_without_a_text_becomes_the_text_error(fields: dict[str, Any], text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
    (message,) = read({"role": "user", "content": [result]}).prompt["messages"][1:]
    assert message == {"role": "tool", "tool_call_id": "toolu_1", "content": text}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_a_call_without_tools_is_refused(choice: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        read(tool_choice=choice)


@pytest.mark.parametrize(
    ("choice", "demanded", "shown", "parallel"),
    [
        (None, 0, 1, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, 0, 1, False),
        ({"type": "any"}, 1, 1, True),
        ({"type": "tool", "name": "f"}, 1, 1, True),
        ({"type": "none"}, 0, 0, True),
    ],
)
def test_the_choice_of_tools(choice: Any, demanded: int, shown: int, parallel: bool) -> None:
    body = read(tools=[TOOL], tool_choice=choice)
    assert (len(body.tool_choice.demanded), body.tool_choice.is_parallel) == (demanded, parallel)
    assert len(body.prompt.get("tools", [])) == shown


def test_options_of_a_job_and_the_tenant() -> None:
    schema = {"type": "object"}
    body = read(
        max_tokens=3,
        min_p=0.1,
        stop_sequences=["a"],
        metadata={"user_id": "alice"},
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
        thinking={"type": "adaptive"},
    )
    expected = {"max_tokens": 3, "min_p": 0.1, "stop_sequences": ["a"], "tenant": "alice", "json_schema": schema}
    assert body.options == expected
    assert body.prompt["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\.0\.type: llamaq supports custom"),
        ({"tools": [{"name": "f"}]}, r"tools\.0: a name and an object as input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "there is no tool 'g'"),
        ({"tool_choice": {"type": "some"}}, r"tool_choice\.type: auto, any, none"),
        ({"thinking": {"type": "always"}}, r"thinking\.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, r"thinking\.budget_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers: llamaq does not support it"),
        ({"system": [{"type": "image"}]}, r"system\.0\.type: llamaq does not support blocks of the type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, r"content\.0\.tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            r"content\.0: the texts id and name",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, r"content\.0\.text"),
        ({"messages": [{"role": "user", "content": [[]]}]}, r"content\.0: a block"),
        ({"messages": []}, "messages: a list of messages"),
        ({"metadata": []}, "metadata: an object"),
    ],
)
def test_a_field_of_another_form_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(**fields)


BILLING = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("system", [[{"type": "text", "text": BILLING}, {"type": "text", "text": "Be kind."}], BILLING])
def test_the_billing_header_of_claude_code_is_no_part_of_the_prompt(system: Any) -> None:
    """Claude Code (`x-anthropic-billing-header`) signs each request in its system prompt. llama-server neutralizes the
    changing part too, because it ends the prefix that a cache can reuse.
    """
    text = f"{BILLING}Be kind." if system == BILLING else system
    assert read(system=text).prompt["messages"][0] == {"role": "system", "content": "Be kind."}
    assert read(system=BILLING).prompt["messages"] == [USER]
    assert read(system=f"Not {BILLING}").prompt["messages"][0]["content"] == f"Not {BILLING}"
