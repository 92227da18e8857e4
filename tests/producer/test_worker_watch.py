"""A client notices at once that no worker serves the queue of a job that it waits for."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from llamaq.common.errors import NoWorker
from llamaq.producer import AsyncClient, Client, QueueDepth, worker_watch
from llamaq.producer.testing import FakeWorker


def n_reports(caplog: pytest.LogCaptureFixture) -> int:
    """Return how often the log says that no worker serves a queue."""
    return sum("client.no_worker" in record.message for record in caplog.records if record.levelno == logging.WARNING)


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110  # there is no event to await
        await asyncio.sleep(0.005)


async def test_a_call_that_waits_for_a_queue_without_worker_reports_it_once_and_goes_on(
    redis_url: str, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger=worker_watch.__name__)  # the command line hides these warnings
    async with AsyncClient(redis_url, queue) as client:
        waiting = [asyncio.create_task(client.generate("hello")) for _ in range(3)]
        await until(lambda: n_reports(caplog))
        async with FakeWorker(redis_url, queue) as worker:
            for _ in waiting:
                await (await worker.start_next()).answer(["a"])
        assert [(await one).text for one in waiting] == ["a"] * 3
        assert n_reports(caplog) == 1
        assert f"llamaq worker --queue {queue}" in caplog.text


async def test_a_call_looks_again_while_it_waits(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_watch, "SEARCH_EVERY_S", 0.02)
    caplog.set_level(logging.WARNING, logger=worker_watch.__name__)
    async with AsyncClient(redis_url, queue) as client:
        async with FakeWorker(redis_url, queue) as worker:
            await worker.announce()
            waiting = asyncio.create_task(client.generate("hello"))
            attempt = await worker.start_next()
            await asyncio.sleep(0.1)
            assert n_reports(caplog) == 0
            await worker.redis.delete(worker.keys.worker(worker.name))
            await until(lambda: n_reports(caplog))
            await attempt.answer(["a"])
        assert (await waiting).text == "a"


async def test_a_client_that_requires_a_worker_fails_before_the_submit(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue, require_worker=True) as client:
        with pytest.raises(NoWorker, match=queue):
            await client.generate("hello")
        with pytest.raises(NoWorker, match=queue):
            await client.stream("hello")
        with pytest.raises(NoWorker, match=queue):
            await client.submit("hello")
        with pytest.raises(NoWorker, match=queue):
            await client.submit_many([{"prompt": "hello"}])
        assert await client.queue_depth() == QueueDepth(waiting=0, running=0)


async def test_a_client_that_requires_a_worker_stops_waiting_for_a_job(redis_url: str, queue: str) -> None:
    async with (
        AsyncClient(redis_url, queue, require_worker=True) as client,
        AsyncClient(redis_url, queue) as submitter,
    ):
        job = client.job((await submitter.submit("hello")).id)
        with pytest.raises(NoWorker, match=job.id) as caught:
            await job.result()
        assert caught.value.queue == queue
        with pytest.raises(NoWorker, match=job.id):
            await anext(client.job(job.id).stream())
        assert (await client.queue_depth()).waiting == 1


def test_the_blocking_client_reports_and_requires_workers_too(redis_url: str, queue: str) -> None:
    with Client(redis_url, queue, require_worker=True) as client, pytest.raises(NoWorker, match=queue):
        client.generate("hello")
