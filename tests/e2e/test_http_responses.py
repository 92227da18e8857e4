"""OpenAI's Responses API of `llamaq serve` in front of a real worker, with the openai package as the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel
from tests.support.http_server import serving_http
from tests.support.lazy_import import lazy_import

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


@asynccontextmanager
async def connected(demo: ServedQueue) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving_http(demo.url, demo.queue) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


async def test_a_response_is_stored_and_continued(demo: ServedQueue, client: Client) -> None:
    chat: Any = [{"role": "system", "content": "You are kind."}, *HELLO]
    expected = client.chat(chat, temperature=0, max_tokens=12)
    async with connected(demo) as api:
        first = await api.responses.create(
            model=demo.queue, input="Hello", instructions="You are kind.", metadata={"a": "b"}, **GREEDY
        )
    async with connected(demo) as other:  # another server
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
    async with connected(demo) as api, connected(demo) as other:
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
    async with connected(demo) as api:
        done = await api.responses.create(**options, **GREEDY)
        while done.status in ("queued", "in_progress"):
            done = await api.responses.retrieve(done.id)
        running = await api.responses.create(**options, extra_body=endless)
        cancelled = await api.responses.cancel(running.id)
        deleted = await api.responses.create(**options, extra_body=endless)
        await api.responses.delete(deleted.id)
        pending = await api.responses.create(**options, extra_body=endless)
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            await api.responses.create(model=demo.queue, input="x", previous_response_id=pending.id)
        await api.responses.cancel(pending.id)
        failed = await api.responses.create(model=demo.queue, input="word " * 3000, background=True)
        while failed.status in ("queued", "in_progress"):
            failed = await api.responses.retrieve(failed.id)
    assert done.output_text
    assert running.status in ("queued", "in_progress")
    assert cancelled.status == "cancelled"
    assert failed.status == "failed"
    assert failed.error is not None
    assert "prompt_too_long" in failed.error.message


async def test_parse_returns_an_object_of_the_given_class(demo: ServedQueue) -> None:
    async with connected(demo) as api:
        parsed = await api.responses.parse(model=demo.queue, input="Hello", text_format=Choice, temperature=0)
    assert isinstance(parsed.output_parsed, Choice)
