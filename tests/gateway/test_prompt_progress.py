"""`return_progress` and `timings_per_token` in the streams of each API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.gateway.test_disconnects import CHAT, MESSAGES, gateway, until
from tests.support.prompt_progress import emit_progress

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_events import PromptProgress
from llamaq.gateway.progress_fields import ProgressFields, ProgressOptions
from llamaq.producer import Chunk
from llamaq.producer.openai_format.request_body import read_options

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
PROGRESS = [{"total": 30, "cache": 5, "processed": n_processed, "time_ms": 0} for n_processed in (5, 30)]


async def events_of(redis_url: str, queue: str, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream whose job computes its prompt in one chunk and generates two tokens."""
    body = {**BODIES[path], "stream": True, **fields}
    has_first = asyncio.Event()
    async with (
        gateway(redis_url, queue) as (url, worker, client),
        httpx.AsyncClient(base_url=url, timeout=60) as http,
        http.stream("POST", path, json=body) as answer,
    ):

        async def work() -> None:
            attempt = await worker.start_next()

            async def is_followed() -> bool:
                channel = client.keys.of_job(attempt.claim.job_id).channel
                return dict(await client.redis.pubsub_numsub(channel))[channel.encode()] > 0

            await until(is_followed)
            for n_processed in (5, 30):
                await emit_progress(attempt, n_processed, 30, cached_tokens=5)
            await attempt.emit([0], "a")
            await has_first.wait()  # a reader that has read no event before the end gets both tokens in one chunk
            await attempt.emit([1], "b")
            await attempt.finish()

        working = asyncio.create_task(work())
        lines = []
        async for line in answer.aiter_lines():
            lines.append(line)
            if '"a"' in line:
                has_first.set()
        has_first.set()
        await working
        assert answer.status_code == 200, lines
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("path", BODIES)
async def test_progress_comes_first(redis_url: str, queue: str, path: str) -> None:
    events = await events_of(redis_url, queue, path, return_progress=True)
    places = [at for at, event in enumerate(events) if "prompt_progress" in event]
    assert [events[at]["prompt_progress"] for at in places] == PROGRESS
    first = 2 if path == "/v1/responses" else 0
    assert places == [first, first + 1]
    assert not [event for event in events[:-2] if "timings" in event]
    if path == CHAT:
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas == [{"role": "assistant", "content": None}, {}, {"content": "a"}, {"content": "b"}, {}]
    elif path == "/v1/responses":
        assert {events[at]["type"] for at in places} == {"response.in_progress"}
        numbers = [event["sequence_number"] for event in events]
        assert numbers[:5] == [0, 1, 1, 1, 2], "a stream resumed after the progress begins with the next event"
        assert events[-1]["timings"]["predicted_n"] == 2


@pytest.mark.parametrize("path", BODIES)
async def test_each_event_has_timings_on_request(redis_url: str, queue: str, path: str) -> None:
    events = await events_of(redis_url, queue, path, timings_per_token=True)
    assert not [event for event in events if "prompt_progress" in event]
    is_response = path == "/v1/responses"
    new_text = [event for event in events if not is_response or event["type"] == "response.output_text.delta"]
    found = [event["timings"] for event in new_text if "timings" in event and "queue_ms" not in event["timings"]]
    assert [(each["cache_n"], each["prompt_n"], each["predicted_n"]) for each in found] == [(5, 25, 1), (5, 25, 2)]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_each_chunk_has_the_usage_so_far_on_request(redis_url: str, queue: str, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await events_of(redis_url, queue, path, stream_options=options)
    assert not [event for event in events if "prompt_progress" in event]
    counts = [(event["usage"]["completion_tokens"], event["usage"]["prompt_tokens"]) for event in events[:-2]]
    assert counts == ([(1, 30)] if path == CHAT else []) + [(1, 30), (2, 30)]
    assert events[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == 2
    assert events[-1]["choices"] == []


@pytest.mark.parametrize("options", [{"include_usage": True}, {"continuous_usage_stats": True}])
async def test_chunks_have_no_usage_without_both_options(redis_url: str, queue: str, options: dict[str, bool]) -> None:
    events = await events_of(redis_url, queue, CHAT, stream_options=options)
    assert not [event for event in events if event["choices"] and "usage" in event]


def test_the_usage_of_a_resumed_job_counts_its_prompt_alone() -> None:
    """The progress of the second attempt is that of the prompt and of the token that the first one has generated."""
    fields = ProgressFields(ProgressOptions(has_usage=True))
    for n_tokens in (1, 2):
        n_ready = 29 + n_tokens
        progress = PromptProgress(total_tokens=n_ready, cached_tokens=0, processed_tokens=n_ready, time_ms=1.0)
        assert fields.of(Chunk("", (), 0, 0, progress=progress)) is None
        found = fields.of(Chunk("a", (7,), 0, 0))
        assert found is not None
        assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (30, n_tokens)


@pytest.mark.parametrize("path", [CHAT, "/completion"])
async def test_a_stream_that_does_not_ask_has_neither(redis_url: str, queue: str, path: str) -> None:
    events = await events_of(redis_url, queue, path)  # the fake worker publishes progress all the same
    assert not [event for event in events if "prompt_progress" in event]
    assert ["timings" in event for event in events] == [False] * (len(events) - 1) + [True]


def test_only_a_stream_with_usage_in_each_chunk_asks_its_job_for_progress() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert read_options({"stream": True, "stream_options": both}) == {"prompt_progress": True}
    assert read_options({"stream_options": both}) == {}
    assert read_options({"stream": True, "stream_options": {"include_usage": True}}) == {}


def test_only_a_stream_asks_its_job_for_progress() -> None:
    for name in ("return_progress", "prompt_progress", "timings_per_token"):
        assert read_options({"stream": True, name: True}) == {"prompt_progress": True}
        assert read_options({name: True}) == {}
        assert read_options({"stream": True, name: False}) == {}
        with pytest.raises(InvalidRequest, match=name):
            read_options({"stream": True, name: 1})


def test_the_timings_of_a_running_answer() -> None:
    now_s = 100.0
    fields = ProgressFields(ProgressOptions(has_progress=True, has_timings=True), lambda: now_s)

    def timings(*tokens: int, progress: PromptProgress | None = None) -> dict[str, Any]:
        found = fields.of(Chunk("", tokens, 0, 0, progress=progress))
        assert found is not None
        return dict(found["timings"])

    first = PromptProgress(total_tokens=30, cached_tokens=10, processed_tokens=10, time_ms=0)
    assert set(timings(progress=first).values()) == {0, 10}
    last = first.model_copy(update={"processed_tokens": 30, "time_ms": 40})
    assert timings(progress=last) | {"predicted_n": 0} == {
        "cache_n": 10,
        "prompt_n": 20,
        "prompt_ms": 40,
        "prompt_per_token_ms": 2,
        "prompt_per_second": 500,
        "predicted_n": 0,
        "predicted_ms": 0,
        "predicted_per_token_ms": 0,
        "predicted_per_second": 0,
    }
    now_s += 5
    assert timings(1, 2)["predicted_ms"] == 0
    now_s += 0.1
    then = timings(3)
    assert (then["predicted_n"], round(then["predicted_ms"]), round(then["predicted_per_second"])) == (3, 100, 10)
