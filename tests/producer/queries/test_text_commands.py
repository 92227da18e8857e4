"""A text command is answered by any live worker, and its wait does not stop the other commands of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import InvalidRequest, WorkerEnded
from llamaq.common.protocol import codec
from llamaq.common.protocol.text_commands import TextCommand, TextReply
from llamaq.common.redis.connect import MAX_CONNECTIONS
from llamaq.gateway.http.errors import code_of, status_of
from llamaq.producer import AsyncClient
from llamaq.producer.queries import text_commands, worker_commands
from llamaq.producer.testing import FakeWorker


@asynccontextmanager
async def answering(worker: FakeWorker) -> AsyncIterator[None]:
    """Answer each text command of a worker with one token."""

    async def answer() -> None:
        while True:
            found: Any = await worker.redis.blpop([worker.keys.text_commands(worker.name)], timeout=0.1)
            if found is not None:
                command = codec.decode_model(TextCommand, found[1])
                await worker.redis.rpush(worker.keys.reply(command.id), codec.encode_model(TextReply(tokens=(7,))))

    task = asyncio.create_task(answer())
    try:
        yield
    finally:
        await cancel_tasks(task)


async def until_asked(worker: FakeWorker, n_commands: int = 1) -> None:
    async with asyncio.timeout(30):
        while await worker.redis.llen(worker.keys.text_commands(worker.name)) < n_commands:  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.01)


async def end(worker: FakeWorker) -> None:
    """Let the heartbeat of a worker expire."""
    await worker.redis.delete(worker.keys.worker(worker.name))


async def test_another_worker_is_asked_if_the_first_ends_before_it_replies(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_commands.random, "choice", lambda workers: workers[0])  # type: ignore[attr-defined]
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue, name=f"{queue}-w1") as first,
        FakeWorker(redis_url, queue, name=f"{queue}-w2") as second,
        answering(second),
    ):
        await first.announce()
        await second.announce()
        asking = asyncio.create_task(client.tokenize("x"))
        await until_asked(first)
        await end(first)
        assert await asking == [7]


async def test_a_worker_whose_heartbeat_is_late_is_not_asked_while_another_has_a_new_one(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_commands.random, "choice", lambda workers: workers[0])  # type: ignore[attr-defined]
    async with (
        AsyncClient(redis_url, queue) as client,
        FakeWorker(redis_url, queue, name=f"{queue}-w1") as silent,
        FakeWorker(redis_url, queue, name=f"{queue}-w2") as live,
        answering(live),
    ):
        await silent.announce(now_ms=1_000)
        await live.announce(now_ms=10_000)
        assert await client.tokenize("x") == [7]
        assert not await client.redis.exists(client.keys.text_commands(silent.name))


async def test_without_another_worker_the_error_is_a_503_and_not_a_bad_request(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue, name=f"{queue}-w1") as worker:
        await worker.announce()
        asking = asyncio.create_task(client.tokenize("x"))
        await until_asked(worker)
        await end(worker)
        with pytest.raises(WorkerEnded, match="before it replied") as ended:
            await asking
    assert (status_of(ended.value), code_of(ended.value)) == (503, "worker_ended")


async def test_a_text_that_is_not_unicode_is_refused(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        for call in (client.tokenize, lambda text: client.apply_template([{"role": "user", "content": text}])):
            with pytest.raises(InvalidRequest, match="a text of the input is not valid Unicode"):
                await call("half a pair: \ud83d")


async def test_commands_that_wait_for_a_silent_worker_leave_connections_for_other_calls(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_commands, "REPLY_BLOCK_S", 600.0)
    url = f"{redis_url}?socket_timeout=900"
    async with AsyncClient(url, queue, timeout_s=1000) as client, FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        n_commands = 3 * MAX_CONNECTIONS
        asking = [asyncio.create_task(client.tokenize("x")) for _ in range(n_commands)]
        await until_asked(worker, n_commands)
        await client.submit("x")  # without free connections, it would wait until a read of 600 s ends
        async with answering(worker):
            assert await asyncio.gather(*asking) == [[7]] * n_commands
