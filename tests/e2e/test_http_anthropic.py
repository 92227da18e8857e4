"""Anthropic's messages API of `llamaq serve` in front of a real worker, with the anthropic package as the client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel
from tests.support.http_server import serving_http
from tests.support.lazy_import import lazy_import

from llamaq.producer import Client

if TYPE_CHECKING:
    import anthropic
    from tests.e2e.conftest import ServedQueue
else:
    anthropic = lazy_import("anthropic")


class Unit(BaseModel):
    unit: Literal["C", "F"]


BLOCKS: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
SAME: Any = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello"}]
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
OPTIONS: Any = {"max_tokens": 8, "extra_body": {"temperature": 0}, "system": "You are kind.", "messages": BLOCKS}


async def test_messages_have_the_text_of_the_python_client_streamed_or_not(demo: ServedQueue, client: Client) -> None:
    expected = client.chat(SAME, max_tokens=8, temperature=0)
    async with (
        serving_http(demo.url, demo.queue) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api,
    ):
        message = await api.messages.create(model=demo.queue, **OPTIONS)
        async with api.messages.stream(model=demo.queue, **OPTIONS) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        stopped = await api.messages.create(model=demo.queue, stop_sequences=[expected.text[3:5]], **OPTIONS)
        counted = await api.messages.count_tokens(model=demo.queue, messages=BLOCKS, system="You are kind.")
        models = [model.id async for model in api.models.list()]
        shown = await api.models.retrieve(demo.queue)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
            await api.messages.create(
                **{**OPTIONS, "messages": [{"role": "user", "content": "word " * 9000}]}, model=demo.queue
            )
        with pytest.raises(anthropic.NotFoundError) as missing:
            await api.messages.create(model="no-such-model", **OPTIONS)
        with pytest.raises(anthropic.BadRequestError, match=r"tools\.0\.type: llamaq supports custom"):
            await api.messages.create(model=demo.queue, tools=[SEARCH], **OPTIONS)
    block = message.content[0]
    assert block.type == "text"
    assert block.text == expected.text == "".join(texts)
    assert streamed.content[0].type == "text"
    assert streamed.content[0].text == expected.text
    assert (message.stop_reason, streamed.stop_reason) == ("max_tokens", "max_tokens")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", expected.text[3:5])
    assert message.usage.output_tokens == streamed.usage.output_tokens == 8
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert counted.input_tokens == expected.stats.prompt_tokens
    assert demo.queue in models
    assert (shown.type, shown.id) == ("model", demo.queue)
    assert message._request_id
    assert missing.value.request_id == missing.value.body["request_id"]  # type: ignore[index]  # any JSON
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]  # any JSON


async def test_a_server_may_accept_models_that_it_does_not_know(demo: ServedQueue) -> None:
    async with (
        serving_http(demo.url, demo.queue, accept_any_model=True) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api,
    ):
        assert (await api.messages.create(model="claude-x", **OPTIONS)).model == "claude-x"


WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a unit.",
    "input_schema": {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}},
        "required": ["unit"],
        "additionalProperties": False,
        "$defs": {"Unit": {"enum": ["C", "F"]}},
    },
}
LONG: Any = {"max_tokens": 200, "messages": BLOCKS, "tools": [WEATHER]}


@asynccontextmanager
async def connected(served: ServedQueue) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        serving_http(served.url, served.queue) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as api,
    ):
        yield api


async def test_a_tool_is_used_and_its_result_answered(caller: ServedQueue) -> None:
    """A grammar stands for a model that decides by itself to write a text and two calls. One of them counts."""
    written = "I look." + '\n<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>' * 2
    auto: Any = {**LONG, "model": caller.queue, "extra_body": {"lark": f"start: {json.dumps(written)}"}}
    auto["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    async with connected(caller) as api:
        message = await api.messages.create(**auto)
        async with api.messages.stream(**auto) as stream:
            deltas = [event.partial_json async for event in stream if event.type == "input_json"]
            streamed = await stream.get_final_message()
        text, use = message.content
        assert use.type == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "20"}]}
        turns: Any = [*BLOCKS, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        forced = await api.messages.create(
            **LONG | {"messages": turns},
            model=caller.queue,
            tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        )
        n_tokens = [
            (await api.messages.count_tokens(model=caller.queue, messages=turns[:n], tools=tools)).input_tokens
            for n, tools in ((1, []), (1, [WEATHER]), (3, [WEATHER]))
        ]
    assert text.type == "text"
    assert (text.text, use.name, use.input, message.stop_reason) == ("I look.", "weather", {"unit": "C"}, "tool_use")
    assert streamed.stop_reason == "tool_use"
    assert [block.type for block in streamed.content] == ["text", "tool_use"]
    assert "".join(deltas) == '{"unit": "C"}'
    assert [block.type for block in forced.content] == ["tool_use"]
    assert forced.usage.input_tokens + (forced.usage.cache_read_input_tokens or 0) == n_tokens[2]
    assert n_tokens == sorted(set(n_tokens))


async def test_the_model_thinks_only_if_the_request_says_so(caller: ServedQueue) -> None:
    plain: Any = {"model": caller.queue, "max_tokens": 6, "messages": BLOCKS, "extra_body": {"temperature": 0}}
    async with connected(caller) as api:
        answers = [
            await api.messages.create(**plain),
            await api.messages.create(**plain, thinking={"type": "disabled"}),
            await api.messages.create(**plain, thinking={"type": "enabled", "budget_tokens": 1024}),
        ]
        async with api.messages.stream(**plain, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
            thoughts = [event.thinking async for event in stream if event.type == "thinking"]
            streamed = await stream.get_final_message()
        again: Any = [*BLOCKS, {"role": "assistant", "content": streamed.content}, BLOCKS[0]]
        await api.messages.create(**plain | {"messages": again})
    assert [answer.content[0].type for answer in answers] == ["text", "text", "thinking"]
    (thinking,) = answers[2].content
    assert thinking.type == "thinking"
    assert thinking.thinking == "".join(thoughts)
    assert streamed.content[0].type == "thinking"
    assert streamed.stop_reason == "max_tokens"


async def test_the_thinking_ends_after_its_budget_and_the_model_answers(caller: ServedQueue) -> None:
    plain: Any = {"model": caller.queue, "max_tokens": 40, "messages": BLOCKS, "extra_body": {"temperature": 0}}
    async with connected(caller) as api:
        bounded = await api.messages.create(**plain, thinking={"type": "enabled", "budget_tokens": 5})
        unbounded = await api.messages.create(**plain, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in unbounded.content] == ["thinking"]
    assert [block.type for block in bounded.content] == ["thinking", "text"]
    short, long = bounded.content[0], unbounded.content[0]
    assert (short.type, long.type) == ("thinking", "thinking")
    assert len(short.thinking) < len(long.thinking)
    assert long.thinking.startswith(short.thinking[:3])


async def test_structured_output_is_an_object_of_the_given_class(caller: ServedQueue) -> None:
    async with connected(caller) as api:
        parsed = await api.messages.parse(model=caller.queue, max_tokens=100, messages=BLOCKS, output_format=Unit)
    assert isinstance(parsed.parsed_output, Unit)
