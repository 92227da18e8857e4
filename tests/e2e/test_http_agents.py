"""The requests of agents and of llama.cpp's web interface, as their sources build them.

The model has random weights, so grammars stand for what a trained model decides by itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.http_clients import http_client

if TYPE_CHECKING:
    import httpx
    from tests.e2e.conftest import ServedQueue

UNIT: dict[str, Any] = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
FUNCTION: dict[str, Any] = {"type": "function", "name": "weather", "strict": False, "parameters": UNIT}
PATCH: dict[str, Any] = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
CODEX: dict[str, Any] = {
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    ],
    "tools": [
        {**FUNCTION, "name": "shell_command"},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": PATCH},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [FUNCTION]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": True,
    "stream": True,
    "include": [],
    "prompt_cache_key": "0199",
    "client_metadata": {"x-codex-installation-id": "0"},
}
"""The fields of `ResponsesApiRequest` in codex-rs/codex-api/src/common.rs of Codex, and the kinds of its tools."""
CALL = '<tool_call>\n{"name": "mcp__files__weather", "arguments": {"unit": "C"}}\n</tool_call>'


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


async def test_codex_calls_the_function_of_an_mcp_server(caller: ServedQueue) -> None:
    """Codex finds a tool by the fields `namespace` and `name` of a call, and repeats both (protocol/src/models.rs)."""
    body = {**CODEX, "model": caller.queue, "lark": f"start: {json.dumps(CALL)}"}
    async with http_client(caller) as http:
        events = events_of(await http.post("/v1/responses", json=body))
        call = events[-1]["response"]["output"][-1]
        repeated = {name: call[name] for name in ("type", "namespace", "name", "arguments", "call_id")}
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}
        second = {**body, "input": [*CODEX["input"], repeated, output], "stream": False}
        answer = (await http.post("/v1/responses", json=second)).json()
        items = (await http.get(f"/v1/responses/{answer['id']}/input_items?order=asc")).json()["data"]
    assert [event["type"] for event in events if event["type"].startswith("response.output_item")] == [
        "response.output_item.added", "response.output_item.done",
    ]  # fmt: skip
    shown = [event["item"] for event in events if "item" in event] + [items[2]]
    assert {(item["namespace"], item["name"]) for item in shown} == {("mcp__files", "weather")}
    assert json.loads(call["arguments"]) == {"unit": "C"}
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace"]


CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 32_000,
    "stream": True,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Available agent types: none"},
    ],
    "tools": [{"name": "weather", "description": "The weather.", "input_schema": UNIT, "eager_input_streaming": True}],
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0-1"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "temperature": 1,
    "stop_sequences": ["e", "a"],
}
"""A request of Claude Code 2.1. Its later system message is that of the beta `mid-conversation-system`."""
HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}


def claude_code(served: ServedQueue, signature: str) -> dict[str, Any]:
    billing = f"x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={signature};"
    prompt = {"type": "text", "text": "You are Claude Code. " * 9, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return {**CLAUDE_CODE, "model": served.queue, "system": [{"type": "text", "text": billing}, prompt]}


async def test_requests_of_claude_code_share_the_cells_of_their_prompt(caller: ServedQueue) -> None:
    async with http_client(caller) as http:
        first, second = [
            events_of(await http.post("/v1/messages?beta=true", json=claude_code(caller, signature), headers=HEADERS))
            for signature in ("a5145", "0be3f")
        ]
    assert first[-1]["type"] == second[-1]["type"] == "message_stop"
    usage = second[-2]["usage"]
    assert usage["cache_read_input_tokens"] > 100
    assert usage["input_tokens"] <= 1


LLAMA_UI: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "stream": True,
    "return_progress": True,
    "reasoning_format": "auto",
    "chat_template_kwargs": {"enable_thinking": True},
    "thinking_budget_tokens": 7,
    "reasoning_control": True,
    "temperature": 0,
    "max_tokens": 20,
    "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
    "backend_sampling": False,
    "timings_per_token": True,
}
"""The fields of `sendMessage` in tools/ui/src/lib/services/chat.service.ts of llama.cpp."""


async def test_the_interface_of_llama_server_limits_the_reasoning(caller: ServedQueue) -> None:
    options = {"stream_options": {"include_usage": True}}
    async with http_client(caller) as http:
        answer = await http.post("/v1/chat/completions", json={**LLAMA_UI, "model": caller.queue, **options})
    chunks = events_of(answer)
    assert chunks[0]["prompt_progress"].keys() >= {"total", "cache", "processed", "time_ms"}
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] in range(7, 11)
    assert [bool(chunk["choices"]) for chunk in chunks if "timings" in chunk].count(True) > 2
    assert "timings" in chunks[-1]
