"""Answers of a model whose tags are control tokens: what it spells with other tokens is no tag.

The model has random weights, so grammars stand for what a trained model decides by itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.http_server import serving_http

from llamaq.producer import Client
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Reasoning

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

HELLO: Any = [{"role": "user", "content": "Hello"}]
SCHEMA: Any = {
    "type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
OBJECT = '{"name": "weather", "arguments": {"unit": "C"}}'
SPELLED = f"I write <tool_call>\n{OBJECT}\n</tool_call> after <think>"
WRITES_TEXT = f"start: {json.dumps(SPELLED)}"
WRITES_CALL = f"start: {json.dumps(SPELLED)} <tool_call> {json.dumps(OBJECT)} </tool_call>"
ARGUMENTS = {"unit": "C"}


@pytest.mark.parametrize(("lark", "n_calls"), [(WRITES_TEXT, 0), (WRITES_CALL, 1)])
def test_only_the_token_is_a_tag_for_the_python_client(tagger: ServedQueue, lark: str, n_calls: int) -> None:
    with Client(tagger.url, tagger.queue) as client:
        answers = client.chat_answers(HELLO, tools=TOOLS, lark=lark)
        answer = answers.read(client.chat(HELLO, **answers.options))
        parts = list(answers.parts(client.stream_chat(HELLO, **answers.options)))
    assert (answer.content, answer.reasoning, len(answer.tool_calls)) == (SPELLED, "", n_calls)
    assert [json.loads(str(call.function.arguments)) for call in answer.tool_calls] == [ARGUMENTS] * n_calls
    assert answer.result.tag_offsets == ((len(SPELLED), len(SPELLED + "<tool_call>" + OBJECT)) if n_calls else ())
    assert "".join(part.text for part in parts if isinstance(part, Content)) == SPELLED
    assert sum(isinstance(part, CallStarted) for part in parts) == n_calls
    assert not any(isinstance(part, Reasoning) for part in parts)


def test_a_demanded_call_is_written_with_the_tokens(tagger: ServedQueue) -> None:
    with Client(tagger.url, tagger.queue) as client:
        options: Any = {"max_tokens": 200, "chat_template_kwargs": {"enable_thinking": False}}
        answers = client.chat_answers(HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **options)
        parts = list(answers.parts(client.stream_chat(HELLO, **answers.options)))
    assert [part.name for part in parts if isinstance(part, CallStarted)] == ["weather"]
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert json.loads(arguments)["unit"] in ("C", "F")


def streamed(answer: httpx.Response) -> list[Any]:
    """Return the events of a streamed answer."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("lark", "n_calls"), [(WRITES_TEXT, 0), (WRITES_CALL, 1)])
async def test_only_the_token_is_a_tag_over_http(tagger: ServedQueue, lark: str, n_calls: int) -> None:
    chat: Any = {"model": tagger.queue, "messages": HELLO, "tools": TOOLS, "lark": lark}
    own: Any = {"name": "weather", "parameters": SCHEMA}
    response: Any = {
        "model": tagger.queue, "input": "Hello", "tools": [{"type": "function", **own}], "lark": lark,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    message: Any = {
        "model": tagger.queue, "messages": HELLO, "tools": [{"name": "weather", "input_schema": SCHEMA}], "lark": lark,
        "max_tokens": 400,
    }  # fmt: skip
    async with serving_http(tagger.url, tagger.queue) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        whole = (await http.post("/v1/chat/completions", json=chat)).json()
        chunks = streamed(await http.post("/v1/chat/completions", json=chat | {"stream": True}))
        events = streamed(await http.post("/v1/responses", json=response | {"stream": True}))
        used = (await http.post("/v1/messages", json=message)).json()
        blocks = streamed(await http.post("/v1/messages", json=message | {"stream": True}))
        response_id = events[0]["response"]["id"]
        # Another server resumes the stream, and reads the response.
        async with serving_http(tagger.url, tagger.queue) as other:
            stored = (await http.get(f"{other}/v1/responses/{response_id}")).json()
            rest = streamed(await http.get(f"{other}/v1/responses/{response_id}?stream=true&starting_after=40"))
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == SPELLED
    calls = choice["message"].get("tool_calls", [])
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [ARGUMENTS] * n_calls
    assert choice["finish_reason"] == ("tool_calls" if n_calls else "stop")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == SPELLED
    assert any("tool_calls" in delta for delta in deltas) is bool(n_calls)
    kinds = ["message", *["function_call"] * n_calls]
    assert [item["type"] for item in stored["output"]] == kinds
    assert stored["output"] == events[-1]["response"]["output"] == rest[-1]["response"]["output"]
    assert stored["output"][0]["content"][0]["text"] == SPELLED
    assert [block["type"] for block in used["content"]] == ["text", *["tool_use"] * n_calls]
    assert used["content"][0]["text"] == SPELLED
    starts = [event["content_block"]["type"] for event in blocks if event["type"] == "content_block_start"]
    assert starts == ["text", *["tool_use"] * n_calls]
