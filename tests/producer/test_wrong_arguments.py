"""Arguments of the client that are not valid: each error is an `InvalidRequest` that names its argument."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.protocol.queue_config import QueueConfig
from llamaq.producer import AsyncClient, Client, JobState, Priority
from llamaq.producer.testing import serving

NO_SECONDS = (-1, -0.5, math.nan, "1", True)
NO_COUNTS = (-1, 0, 1.5, "1", True)
NO_IDS: tuple[Any, ...] = (None, 1, "", "x", b"x", [])


def wrong_arguments() -> list[tuple[str, dict[str, Any], str]]:
    """Return calls of a client, each with one wrong argument, and its name."""
    calls: list[tuple[str, dict[str, Any], str]] = []
    value: Any
    for value in NO_SECONDS:
        calls += [
            ("generate", {"prompt": "a", "timeout": value}, "timeout"),
            ("stream", {"prompt": "a", "timeout": value}, "timeout"),
            ("embed", {"inputs": ["a"], "timeout": value}, "timeout"),
            ("slots", {"timeout": value}, "timeout"),
            ("tokenize", {"text": "a", "timeout": value}, "timeout"),
        ]
    for value in NO_COUNTS:
        calls += [
            ("jobs", {"limit": value}, "limit"),
            ("rerank", {"query": "a", "documents": ["b"], "top_n": value}, "top_n"),
        ]
    for value in ("x", 1, b"x"):
        calls += [("jobs", {"state": value}, "state"), ("purge", {"priority": value}, "priority")]
    for value in (-1, "x", "1", True, math.nan, math.inf):
        calls += [
            ("jobs", {"older_than_s": value}, "older_than_s"),
            ("purge", {"older_than_s": value}, "older_than_s"),
        ]
    for value in ("x", 1, []):
        calls += [("purge", {"metadata": value}, "metadata")]
    for value in (-1, 1.5, "1", None, True, 10**30):
        calls += [
            ("submit", {"prompt": "a", "durable": value}, "durable"),
            ("submit_many", {"jobs": [], "durable": value}, "durable"),
        ]
    calls += [
        (name, {"letter_id": value}, "job id") for value in NO_IDS for name in ("dead_letter", "purge_dead_letter")
    ]
    calls += [(name, {"job_id": value}, "job id") for value in NO_IDS for name in ("job", "cancel")]
    calls += [("submit_many", {"jobs": value}, "jobs") for value in (None, 1, "ab", {"prompt": "a"})]
    calls += [("purge", {"tenant": 1}, "tenant"), ("slots", {"worker": 1}, "worker")]
    calls += [("rerank", {"query": "a", "documents": value}, "documents") for value in (None, ())]
    return calls


@pytest.mark.parametrize("call", sorted({call for call, _, _ in wrong_arguments()}))
def test_a_wrong_argument_is_named(redis_url: str, queue: str, call: str) -> None:
    with serving(redis_url, queue, lambda _: ["answer"]), Client(redis_url, queue) as client:
        for name, arguments, expected in wrong_arguments():
            if name == call:
                with pytest.raises(InvalidRequest) as raised:
                    getattr(client, call)(**arguments)
                assert expected in str(raised.value), arguments


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        *(({"requests": value}, "requests") for value in (None, 1, "ab", {"prompt": "a"})),
        *(({"requests": ["a"], "window": value}, "window") for value in (0, 1.5, "1", True)),
        *(({"requests": ["a"], "resume": value}, "resume") for value in ("", 1, b"x")),
    ],
)
async def test_a_wrong_argument_of_map_is_named(
    redis_url: str, queue: str, arguments: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=name), Client(redis_url, queue) as blocking:
        next(blocking.map(**arguments))
    async with AsyncClient(redis_url, queue) as client:
        results: AsyncGenerator[Any, None] = client.map(**arguments)
        with pytest.raises(InvalidRequest, match=name):
            await anext(results)


async def test_names_of_states_and_priorities_filter_jobs(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        job = await client.submit("a", priority="bulk")
        names: dict[str, Any] = {"state": "queued", "priority": "bulk"}
        assert [found.job_id for found in await client.jobs(**names)] == [job.id]
        assert await client.jobs(state=JobState.QUEUED, priority=Priority.INTERACTIVE) == ()
        assert await client.purge(priority=names["priority"]) == (job.id,)


async def test_a_timeout_may_be_endless(redis_url: str, queue: str) -> None:
    with serving(redis_url, queue, lambda _: ["answer"]):
        async with AsyncClient(redis_url, queue) as client:
            assert (await client.generate("a", timeout=math.inf)).text == "answer"
            with pytest.raises(TimeoutError):  # this worker replies to no command
                await asyncio.wait_for(client.slots(timeout=math.inf), 0.1)


@pytest.mark.parametrize(
    "damaged", [{"partitions": "x"}, {"partitions": 0}, {"partitions": 10**9}, {"max_queue": "x"}, {"kind": "x"}]
)
async def test_damaged_settings_of_a_queue_are_reported(redis_url: str, queue: str, damaged: dict[str, Any]) -> None:
    async with AsyncClient(redis_url, queue) as client:
        key = client.keys.config(queue, 0)
        config = QueueConfig(1, 0, 10_000, "model", "model.gguf")
        fields: dict[Any, Any] = {**config.fields(), **damaged}
        await client.redis.hset(key, mapping=fields)
        with pytest.raises(ProtocolError, match="are damaged") as raised:
            await client.queue_depth()
    assert key in str(raised.value)
