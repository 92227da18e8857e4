"""Streams: comments while there is silence, errors before and after the first event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from tests.gateway.test_disconnects import CHAT, STREAMED, gateway
from tests.support.http_server import post_of, sending

from llamaq.common.background_tasks import cancel_tasks
from llamaq.gateway.completions.choice_stream import ChoiceStream
from llamaq.gateway.completions.stream_chunks import StreamChunks
from llamaq.gateway.http import event_stream
from llamaq.gateway.http.event_stream import PLACEHOLDER, TextEvent, data, error_event, named
from llamaq.gateway.progress_fields import ProgressOptions
from llamaq.producer import Chunk
from llamaq.producer.openai_format.endpoints import Endpoint


@pytest.mark.parametrize("text", ["x", "\n", '"}],', "\u2028", "😀", "finish_reason", ""])
def test_a_text_event_is_encoded_like_the_whole_event(text: str) -> None:
    def event(text: str) -> dict[str, object]:
        return {"model": PLACEHOLDER, "choices": [{"delta": {"content": text}, "finish_reason": None}]}

    assert TextEvent(event(PLACEHOLDER)).encode(text) == data(event(text))


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\u2029"])
def test_no_event_has_a_line_break_of_unicode_in_its_line(separator: str) -> None:
    encoded = [data(f"a{separator}b"), named("name", f"a{separator}b"), TextEvent(PLACEHOLDER).encode(f"a{separator}b")]
    for event in encoded:
        line = event.decode().splitlines()[-2]  # as some clients divide lines
        assert json.loads(line.removeprefix("data: ")) == f"a{separator}b"


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("key", ["logprobs", "finish_reason"])
async def test_a_stream_keeps_a_first_piece_that_equals_a_key_of_its_chunks(endpoint: Endpoint, key: str) -> None:
    async def describe(*_: object) -> Any:
        raise AssertionError

    chunks = StreamChunks(endpoint, "id", "model", 1, "fingerprint")
    choice = ChoiceStream(chunks, 0, "job", "", None, describe, describe, ProgressOptions())
    pieces = ["say ", key, " and", " more"]
    events = [await choice.events_of(Chunk(piece, (), number, 0)) for number, piece in enumerate(pieces)]
    lines = [line for event in events for line in event.splitlines() if line]
    choices = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]
    texts = [each["text"] if "text" in each else each["delta"]["content"] for each in choices]
    assert [text for text in texts if text is not None] == pieces


STREAM = post_of(CHAT, STREAMED)


async def test_a_waiting_stream_sends_comments_that_tell_what_it_waits_for(redis_url: str, queue: str) -> None:
    async with gateway(redis_url, queue, ping_s=0.05) as (url, worker, _), sending(url, STREAM) as (reader, _):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"text/event-stream" in head
        for _ in range(3):
            assert (await reader.readuntil(b"\n\n")).endswith(b": queued, 0 ahead\n\n")
        attempt = await worker.start_next()
        await attempt.emit([0], "a")
        await reader.readuntil(b'"content":"a"')
        await attempt.finish(tokens=[1], text="b")
        rest = (await reader.readuntil(b"[DONE]")).decode()
        assert '"content":"b"' in rest
        assert '"finish_reason":"stop"' in rest


async def test_a_stream_with_many_waiting_events_lets_other_tasks_run_between_them() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(1000):
            yield data(number)

    async def comment() -> str:
        raise AssertionError

    n_sent, seen = 0, []

    async def send(_: object) -> None:
        nonlocal n_sent
        n_sent += 1

    async def look() -> None:
        while True:
            seen.append(n_sent)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    stream = await event_stream.EventStream.open(events(), comment=comment, ping_s=60)
    await stream({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    await cancel_tasks(looking)
    assert n_sent == 1000 + 2  # the headers, and the end
    assert max(later - earlier for earlier, later in pairwise(seen)) <= 5  # asyncio warns of more lost writes


async def test_an_error_before_the_first_event_has_a_status(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "FIRST_PING_S", 30.0)  # the error is not late on a busy machine either
    async with gateway(redis_url, queue) as (url, worker, _), sending(url, STREAM) as (reader, _):
        await (await worker.start_next()).fail("chat_template", "no template")
        assert b" 400 " in await reader.readuntil(b"\r\n")


async def test_an_error_after_the_first_event_is_an_event(redis_url: str, queue: str) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), sending(url, STREAM) as (reader, _):
        attempt = await worker.start_next()
        await attempt.emit([1], "word")
        await reader.readuntil(b"word")
        await attempt.fail("decode_failed", "the reason")
        await reader.readuntil(b'data: {"error"')
        fields = json.loads(b'{"error"' + (await reader.readuntil(b"\n\n")).strip())["error"]
        assert fields == {"message": "the reason", "type": "server_error", "code": "decode_failed", "param": None}
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"0\r\n\r\n")


async def test_a_stream_whose_job_still_waits_after_its_first_event_tells_so_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_stream, "FIRST_PING_S", 0.01)
    sent: asyncio.Queue[bytes] = asyncio.Queue()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"created"
        await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        raise AssertionError("a response receives nothing")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await sent.put(message["body"])

    async def comment() -> str:
        return "queued, 3 ahead"

    stream = await event_stream.EventStream.open(events(), comment=comment, ping_s=3600, format_error=error_event)
    sending_it = asyncio.create_task(stream({}, receive, send))
    assert [await sent.get(), await sent.get()] == [b"created", b": queued, 3 ahead\n\n"]
    sending_it.cancel()
    await asyncio.wait([sending_it])


async def test_a_stream_sends_its_comments_in_time_while_redis_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_stream, "COMMENT_TIMEOUT_S", 0.01)
    sent: asyncio.Queue[bytes] = asyncio.Queue()

    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await sent.put(message["body"])

    async def comment() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    stream = await event_stream.EventStream.open(events(), comment=comment, ping_s=0.01)
    sending_it = asyncio.create_task(stream({}, asyncio.Event().wait, send))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        assert [await sent.get() for _ in range(3)] == [b": waiting\n\n"] * 3
    await cancel_tasks(sending_it)


async def test_a_response_whose_end_the_reader_has_is_a_stream_without_events(redis_url: str, queue: str) -> None:
    async with gateway(redis_url, queue) as (url, worker, _), httpx.AsyncClient(base_url=url, timeout=60) as http:
        creating = asyncio.create_task(http.post("/v1/responses", json={"input": "hi"}))
        attempt = await worker.start_next()
        await attempt.emit([1], "hello")
        await attempt.finish()
        path = f"/v1/responses/{(await creating).json()['id']}?stream=true"
        last = json.loads((await http.get(path)).text.strip().rpartition("data: ")[2])["sequence_number"]
        assert (await http.get(f"{path}&starting_after={last - 1}")).text.count("event: ") == 1
        answer = await http.get(f"{path}&starting_after={last}")
        assert (answer.status_code, answer.text) == (200, "")


async def test_an_error_in_the_stream_of_a_response_is_an_event_of_the_type_error(redis_url: str, queue: str) -> None:
    request = post_of("/v1/responses", {"input": "hi", "stream": True})
    async with gateway(redis_url, queue, timeout_s=1.5) as (url, _, _), sending(url, request) as (reader, _):
        await reader.readuntil(b"event: error\ndata: ")
        error = json.loads(await reader.readline())
        assert error["type"] == "error"
        assert "1.5" in error["message"]
