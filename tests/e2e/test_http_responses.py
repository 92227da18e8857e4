"""OpenAI's Responses API of `llamaq serve` in front of a real worker, with the openai package as the client."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel
from tests.support.http_clients import openai_client
from tests.support.lazy_import import lazy_import
from tests.support.workers import only_worker

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.responses.request_body import read_response_body
from llamaq.producer import Client

if TYPE_CHECKING:
    import openai
    from tests.e2e.conftest import ServedQueue
else:
    openai = lazy_import("openai")

HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"temperature": 0, "max_output_tokens": 12}


class Choice(BaseModel):
    answer: Literal["yes", "no"]


async def test_a_response_is_stored_and_continued(demo: ServedQueue, client: Client) -> None:
    chat: Any = [{"role": "system", "content": "You are kind."}, *HELLO]
    expected = client.chat(chat, temperature=0, max_tokens=12)
    async with openai_client(demo) as api:
        first = await api.responses.create(
            model=demo.queue, input="Hello", instructions="You are kind.", metadata={"a": "b"}, **GREEDY
        )
    async with openai_client(demo) as other:  # another server
        again = await other.responses.retrieve(first.id)
        items = [item.model_dump() async for item in await other.responses.input_items.list(first.id)]
        second = await other.responses.create(
            model=demo.queue, input="And you?", previous_response_id=first.id, **GREEDY
        )
        await other.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(first.id)
        unstored = await other.responses.create(model=demo.queue, input="x", store=False, **GREEDY)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(unstored.id)
    assert first.output_text == expected.text
    assert (first.status, first.metadata, first.instructions) == ("incomplete", {"a": "b"}, "You are kind.")
    assert first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    assert first.usage is not None
    assert first.usage.input_tokens == expected.stats.prompt_tokens
    assert again == first
    assert [item["content"][0]["text"] for item in items] == ["Hello"]
    continued: Any = [*HELLO, {"role": "assistant", "content": expected.text}, {"role": "user", "content": "And you?"}]
    assert second.output_text == client.chat(continued, temperature=0, max_tokens=12).text
    assert second.previous_response_id == first.id


async def test_a_stream_is_resumed_at_another_server_from_any_event(demo: ServedQueue) -> None:
    async with openai_client(demo) as api, openai_client(demo) as other:
        stream = await api.responses.create(model=demo.queue, input="Hello", stream=True, background=True, **GREEDY)
        events = [event async for event in stream]
        response_id = events[0].response.id
        numbers = [event.sequence_number for event in events]
        whole = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert whole
        for seen in (-1, 0, numbers[5], numbers[-3]):
            resumed = await other.responses.retrieve(response_id, stream=True, starting_after=seen)
            rest = [event async for event in resumed]
            text = "".join(event.delta for event in rest if event.type == "response.output_text.delta")
            before = [e for e in events if e.sequence_number <= seen and e.type == "response.output_text.delta"]
            assert "".join(event.delta for event in before) + text == whole
            assert min(event.sequence_number for event in rest) > seen
            assert rest[-1] == events[-1]
    assert numbers == sorted(set(numbers))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip


async def test_a_background_response_is_polled_and_cancelled(demo: ServedQueue) -> None:
    options: Any = {"model": demo.queue, "input": "Hello", "background": True}
    endless = {"ignore_eos": True}
    async with openai_client(demo) as api:
        done = await api.responses.create(**options, **GREEDY)
        while done.status in ("queued", "in_progress"):
            done = await api.responses.retrieve(done.id)
        running = await api.responses.create(**options, extra_body=endless)
        cancelled = await api.responses.cancel(running.id)
        deleted = await api.responses.create(**options, extra_body=endless)
        await api.responses.delete(deleted.id)
        delayed = await api.responses.create(**options, extra_body={"delay_s": 0.2})
        with pytest.raises(openai.BadRequestError, match="`background`: true"):
            await api.responses.create(model=demo.queue, input="x", extra_body={"delay_s": 0.2})
        while delayed.status in ("queued", "in_progress"):
            delayed = await api.responses.retrieve(delayed.id)
        pending = await api.responses.create(**options, extra_body=endless)
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            await api.responses.create(model=demo.queue, input="x", previous_response_id=pending.id)
        await api.responses.cancel(pending.id)
        failed = await api.responses.create(model=demo.queue, input="word " * 3000, background=True)
        while failed.status in ("queued", "in_progress"):
            failed = await api.responses.retrieve(failed.id)
    assert done.output_text
    assert delayed.output_text
    assert running.status in ("queued", "in_progress")
    assert cancelled.status == "cancelled"
    assert failed.status == "failed"
    assert failed.error is not None
    assert str(failed.error.code) == "context_length_exceeded", "as at the other endpoints"


async def test_parse_returns_an_object_of_the_given_class(demo: ServedQueue) -> None:
    async with openai_client(demo) as api:
        parsed = await api.responses.parse(model=demo.queue, input="Hello", text_format=Choice, temperature=0)
    assert isinstance(parsed.output_parsed, Choice)


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'
WRITES_CALL: Any = {"lark": f"start: {json.dumps(CALL + CALL[len('I look.') :])}"}
"""A grammar that stands for a model that decides by itself to write a text and two calls."""


async def test_a_function_is_called_and_its_output_answered(caller: ServedQueue) -> None:
    options: Any = {
        "model": caller.queue,
        "tools": [WEATHER],
        "reasoning": {"effort": "none"},
        "parallel_tool_calls": False,
    }
    async with openai_client(caller) as api, openai_client(caller) as other:
        async with api.responses.stream(input="Hello", **options, extra_body=WRITES_CALL) as stream:
            events = [event async for event in stream]
            first = await stream.get_final_response()
        retrieved = await other.responses.retrieve(first.id)
        message, call = first.output
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "20"}  # type: ignore[union-attr]
        forced: Any = {"tool_choice": {"type": "function", "name": "weather"}}
        stored = await other.responses.create(input=[output], previous_response_id=first.id, **options, **forced)
        before: Any = [item.model_dump(exclude_none=True) for item in retrieved.output]
        whole: Any = [{"role": "user", "content": "Hello"}, *before, output]
        stateless = await api.responses.create(input=whole, store=False, **options, **forced)
        items = [item.model_dump() async for item in other.responses.input_items.list(stored.id)]
        counted = await api.responses.input_tokens.count(input=[output], previous_response_id=first.id, **options)
        resumed = await other.responses.retrieve(first.id, stream=True, starting_after=events[-4].sequence_number)
        rest = [event async for event in resumed]
    assert [item.to_dict() for item in retrieved.output] == [done.item.to_dict() for done in finished(events)]
    assert message.type == "message"
    assert call.type == "function_call"
    assert (first.output_text, call.name, call.arguments) == ("I look.", "weather", '{"unit": "C"}')
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert [event.type for event in rest] == [event.type for event in events[-3:]]
    for answer in (stored, stateless):
        (again,) = answer.output
        assert again.type == "function_call"
        assert json.loads(again.arguments)["unit"] in ("C", "F")
        assert answer.usage is not None
        assert answer.usage.input_tokens == counted.input_tokens
    assert stored.tools[0].model_dump(exclude_none=True) == WEATHER
    assert [(item["type"], item["output"]) for item in items] == [("function_call_output", "20")]


def finished(events: Iterable[Any]) -> list[Any]:
    return [event for event in events if event.type == "response.output_item.done"]


async def test_reasoning_is_an_item_of_its_own(caller: ServedQueue) -> None:
    thinking: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    options: Any = {"model": caller.queue, "input": "Hello", **GREEDY}
    async with openai_client(caller) as api:
        stream = await api.responses.create(stream=True, extra_body=thinking, **options)
        events = [event async for event in stream]
        effortless = await api.responses.create(reasoning={"effort": "none"}, **options)
        response: Any = events[-1].response
        followed = await api.responses.create(previous_response_id=response.id, **options)
    (item,) = response.output
    assert (item.type, response.status) == ("reasoning", "incomplete")
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert item.content[0].text == "".join(deltas) != ""
    assert [item.type for item in effortless.output] == ["message"]
    assert followed.usage is not None
    assert followed.usage.input_tokens > response.usage.input_tokens


async def test_probabilities_belong_to_the_text(demo: ServedQueue) -> None:
    options: Any = {"model": demo.queue, "input": "Hello", "include": ["message.output_text.logprobs"], **GREEDY}
    async with openai_client(demo) as api, openai_client(demo) as other:
        stream = await api.responses.create(**options, top_logprobs=2, stream=True)
        events = [event async for event in stream]
        response: Any = events[-1].response
        assert await other.responses.retrieve(response.id) == response
    (part,) = response.output[0].content
    assert len(part.logprobs) == 12
    assert "".join(each.token for each in part.logprobs) == part.text
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all("".join(each.token for each in event.logprobs) == event.delta for event in deltas)
    assert sum(len(event.logprobs) for event in deltas) == 12


async def test_a_conversation_that_is_too_long_is_shortened_if_the_request_says_so(demo: ServedQueue) -> None:
    turns: Any = [{"role": role, "content": "word " * 50} for role in ["user", "assistant"] * 20] + HELLO
    with demo.client() as client:
        card = only_worker(client).card
    n_context = min(card.n_ctx, card.n_ctx_train)
    options: Any = {"model": demo.queue, "input": turns, "max_output_tokens": n_context}
    async with openai_client(demo) as api:
        with pytest.raises(openai.BadRequestError) as too_long:
            await api.responses.create(**options)
        answer = await api.responses.create(**options, truncation="auto", extra_body={"choice": ["yes"]})
    assert too_long.value.code == "context_length_exceeded"
    assert answer.usage is not None
    assert n_context // 4 < answer.usage.input_tokens <= n_context // 2
    assert (answer.truncation, answer.output_text) == ("auto", "yes")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, r"tools\.0\.type: llamaq supports function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, r"tool_choice\.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\.0\.type: llamaq supports items"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, r"input\.0: the texts call_id, name and arguments"),
        ({"input": [{"type": "reasoning", "content": ["x"]}]}, r"input\.0\.content"),
        ({"truncation": "last"}, "truncation: auto or disabled"),
        ({"reasoning": {"effort": 1}}, "reasoning_effort: a text"),
        ({"reasoning": {"summary": "long"}}, r"reasoning\.summary: auto"),
    ],
)
def test_a_body_that_cannot_be_read_names_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_response_body({"input": "Hello", **fields})
