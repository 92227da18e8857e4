"""Chats with tools and reasoning through `llamaq serve`, with the openai package as the client.

The model has random weights, so grammars stand for what a trained model decides by itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict
from tests.support.http_clients import openai_client
from tests.support.lazy_import import lazy_import

if TYPE_CHECKING:
    import openai
    from tests.e2e.conftest import ServedQueue
else:
    openai = lazy_import("openai")

HELLO: Any = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'
THINKING: Any = {"chat_template_kwargs": {"enable_thinking": True}}


class weather(BaseModel):  # noqa: N801  # the name of the tool
    model_config = ConfigDict(extra="forbid")

    unit: Literal["C", "F"]


async def test_the_model_may_call_tools_by_itself(caller: ServedQueue) -> None:
    answer = f"I look. \n{CALL}\n{CALL}"
    options: Any = {
        "model": caller.queue,
        "messages": HELLO,
        "tools": [openai.pydantic_function_tool(weather)],
        "extra_body": {"lark": f"start: {json.dumps(answer)}"},
    }
    async with openai_client(caller) as api:
        whole = await api.chat.completions.parse(**options)
        async with api.chat.completions.stream(**options) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_completion()
    for completion in (whole, streamed):
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls = choice.message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == [weather(unit="C")] * 2
        assert len({call.id for call in calls}) == 2
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 2


async def test_without_parallel_calls_further_calls_of_the_model_are_left_out(caller: ServedQueue) -> None:
    options: Any = {
        "model": caller.queue,
        "messages": HELLO,
        "tools": [openai.pydantic_function_tool(weather)],
        "parallel_tool_calls": False,
        "extra_body": {"lark": f"start: {json.dumps(f'I look. {CALL}{CALL}{CALL}')}"},
    }
    async with openai_client(caller) as api:
        whole = await api.chat.completions.parse(**options)
        async with api.chat.completions.stream(**options) as stream:
            streamed = await stream.get_final_completion()
    for completion in (whole, streamed):
        (choice,) = completion.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        (call,) = choice.message.tool_calls or []
        assert call.function.parsed_arguments == weather(unit="C")


async def test_reasoning_comes_before_objects_and_calls(caller: ServedQueue) -> None:
    options: Any = {"model": caller.queue, "messages": HELLO, "response_format": weather}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": weather.model_json_schema()}}]
    async with openai_client(caller) as api:
        parsed = await api.chat.completions.parse(**options, max_tokens=60, reasoning_effort="none")
        either = await api.chat.completions.create(
            **options | {"response_format": {"type": "json_object"}}, tools=tools, max_completion_tokens=1,
            extra_body=THINKING,
        )  # fmt: skip
        cut = await api.chat.completions.create(
            model=caller.queue, messages=HELLO, max_tokens=6, tools=tools, tool_choice="required", extra_body=THINKING
        )
        kept = await api.chat.completions.create(
            model=caller.queue, messages=HELLO, max_tokens=6, extra_body={**THINKING, "reasoning_format": "none"}
        )
    assert kept.choices[0].message.content
    assert isinstance(parsed.choices[0].message.parsed, weather)
    assert either.choices[0].message.content == ""
    message = cut.choices[0].message
    assert (message.content, message.tool_calls) == ("", None)
    assert message.model_dump()["reasoning_content"]


@pytest.mark.parametrize("served", ["caller", "tagger"])  # tags in texts, and tags in tokens
async def test_the_usage_has_the_tokens_of_reasoning(served: str, request: pytest.FixtureRequest) -> None:
    queue: ServedQueue = request.getfixturevalue(served)
    extra: Any = {"extra_body": {**THINKING, "reasoning_budget": 7}}
    chat: Any = {"model": queue.queue, "messages": HELLO, "n": 2, "max_tokens": 20, "temperature": 0, **extra}
    asked: Any = {"model": queue.queue, "input": "Hello", "max_output_tokens": 20, "temperature": 0, **extra}
    async with openai_client(queue) as api:
        whole = await api.chat.completions.create(**chat)
        chunks = await api.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
        *_, last = [chunk async for chunk in chunks]
        response = await api.responses.create(**asked)
        events = [event async for event in await api.responses.create(**asked, stream=True)]
        stored = await api.responses.retrieve(response.id)
    usages: list[Any] = [each.usage for each in (response, stored, events[-1].response)]
    counts = [usage.output_tokens_details.reasoning_tokens for usage in usages]
    n_tokens = counts[0]
    assert n_tokens in range(7, 11), "the reasoning ends at its budget, and not within a character"
    assert counts == [n_tokens] * 3
    for answer in (whole, last):
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * n_tokens
