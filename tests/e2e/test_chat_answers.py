"""Chats with tools and reasoning through the Python clients.

The model has random weights, so grammars stand for what a trained model decides by itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from llamaq.producer import AsyncClient, Client, InvalidRequest, NoWorker
from llamaq.producer.answer_parts.parts import CallArguments, CallStarted, Content, Reasoning

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

HELLO: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'
THINKING: Any = {"enable_thinking": True}


def test_a_call_of_the_blocking_client_is_read_from_the_result_and_from_the_stream(caller: ServedQueue) -> None:
    with Client(caller.url, caller.queue) as client:
        answers = client.chat_answers(HELLO, tools=TOOLS, lark=f"start: {json.dumps(f'I look. {CALL}')}")
        answer = answers.read(client.chat(HELLO, **answers.options))
        parts = list(answers.parts(client.stream_chat(HELLO, **answers.options)))
        assert (answer.content, answer.reasoning) == ("I look.", "")
        (call,) = answer.tool_calls
        assert (call.function.name, json.loads(str(call.function.arguments))) == ("weather", {"unit": "C"})
        assert "".join(part.text for part in parts if isinstance(part, Content)) == "I look."
        assert [part.name for part in parts if isinstance(part, CallStarted)] == ["weather"]
        arguments = [part.text for part in parts if isinstance(part, CallArguments)]
        assert json.loads("".join(arguments)) == {"unit": "C"}
        told = {"role": "tool", "content": "20", "tool_call_id": call.id}
        assert client.chat([*HELLO, answer.message, told], max_tokens=4).text, "the answer is a message of the chat"


def test_without_parallel_calls_only_the_first_one_is_read(caller: ServedQueue) -> None:
    with Client(caller.url, caller.queue) as client:
        twice: Any = {"lark": f"start: {json.dumps(f'I look. {CALL}{CALL}')}"}
        answers = client.chat_answers(HELLO, tools=TOOLS, parallel_tool_calls=False, **twice)
        assert len(answers.read(client.chat(HELLO, **answers.options)).tool_calls) == 1
        parts = list(answers.parts(client.stream_chat(HELLO, **answers.options)))
        assert sum(isinstance(part, CallStarted) for part in parts) == 1
        both = client.chat_answers(HELLO, tools=TOOLS, **twice)
        assert len(both.read(client.chat(HELLO, **both.options)).tool_calls) == 2


async def test_a_demanded_call_follows_the_schema_of_its_tool(caller: ServedQueue) -> None:
    async with AsyncClient(caller.url, caller.queue) as client:
        answers = await client.chat_answers(
            HELLO,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
            chat_template_kwargs={"enable_thinking": False},
        )
        answer = answers.read(await client.chat(HELLO, **answers.options))
        assert len(answer.tool_calls) == 1, answer
        (call,) = answer.tool_calls
        assert call.function.name == "weather"
        assert json.loads(str(call.function.arguments))["unit"] in ("C", "F")


async def test_reasoning_is_a_part_of_its_own(caller: ServedQueue) -> None:
    options: Any = {"chat_template_kwargs": THINKING, "max_tokens": 6}
    async with AsyncClient(caller.url, caller.queue) as client:
        answers = await client.chat_answers(HELLO, **options)
        answer = answers.read(await client.chat(HELLO, **answers.options))
        stream = await client.stream_chat(HELLO, **answers.options)
        parts = [part async for part in answers.async_parts(stream)]
    assert answer.reasoning
    assert (answer.content, answer.message.reasoning_content) == ("", answer.reasoning)
    assert all(isinstance(part, Reasoning) for part in parts)


async def test_an_answer_that_was_cut_inside_its_reasoning_is_continued_there(caller: ServedQueue) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "", "reasoning_content": "Say <think> or </think>"}]
    async with AsyncClient(caller.url, caller.queue) as client:
        for options in ({"max_tokens": 6}, {"json_schema": {"enum": ["C"]}, "max_tokens": 6}):
            answers = await client.chat_answers(messages, continue_final_message=True, **options)
            answer = answers.read(await client.chat(messages, **answers.options))
            assert answer.reasoning, answer
            assert answer.content == ""


async def test_without_tools_the_text_is_the_content(caller: ServedQueue) -> None:
    async with AsyncClient(caller.url, caller.queue) as client:
        answers = await client.chat_answers(HELLO, tools=TOOLS, tool_choice="none", regex="yes")
        assert not answers.options["tools"]
        answer = answers.read(await client.chat(HELLO, **answers.options))
        assert (answer.content, answer.tool_calls, answer.message.tool_calls) == ("yes", (), None)


async def test_wrong_tools_and_a_queue_without_a_worker_are_errors(caller: ServedQueue, queue: str) -> None:
    async with AsyncClient(caller.url, caller.queue) as client, AsyncClient(caller.url, queue) as unserved:
        choice = {"type": "function", "function": {"name": "cook"}}
        with pytest.raises(InvalidRequest, match="there is no tool 'cook'"):
            await client.chat_answers(HELLO, tools=TOOLS, tool_choice=choice)
        with pytest.raises(NoWorker):
            await unserved.chat_answers(HELLO, tools=TOOLS)
