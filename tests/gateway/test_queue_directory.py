"""The directory of queues reads the workers in the background while requests come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.gateway.test_disconnects import until
from tests.support.worker_cards import announce_card

from llamaq.common.protocol.queue_and_worker_state import LoraScale
from llamaq.common.protocol.queue_config import QueueConfig
from llamaq.gateway import queue_directory
from llamaq.gateway.generation import Generation
from llamaq.gateway.keys.key_record import KeyRecord
from llamaq.gateway.model_names import NamedModel, Served
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.settings import serve_settings
from llamaq.producer.testing import FakeWorker


class CountingDirectory(QueueDirectory):
    """A directory that counts its reads."""

    n_reads = 0
    fails = False

    async def _read(self) -> None:
        self.n_reads += 1
        if self.fails:
            raise RedisConnectionError("away")
        await super()._read()

    @property
    def is_refreshing(self) -> bool:
        return bool(self._refreshing)


@asynccontextmanager
async def directory_of(redis_url: str, queue: str) -> AsyncIterator[CountingDirectory]:
    directory = CountingDirectory(serve_settings(redis_url=redis_url, queue=queue))
    try:
        yield directory
    finally:
        await directory.aclose()
    assert not directory.is_refreshing


async def until_read(directory: CountingDirectory, n_reads: int) -> None:
    async def has_read() -> bool:
        return directory.n_reads >= n_reads

    await until(has_read)


async def test_only_the_first_request_waits_for_a_read(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_directory, "REFRESH_S", 0.01)
    monkeypatch.setattr(queue_directory, "FRESH_S", 3600.0)
    async with directory_of(redis_url, queue) as directory, FakeWorker(redis_url, queue) as worker:
        assert not (await directory.served()).get(queue)
        await worker.announce()
        await until_read(directory, directory.n_reads + 2)  # the first of them may have begun before
        asking = directory.served()
        with pytest.raises(StopIteration) as ended:
            asking.send(None)  # the call ends without waiting for anything
        served: Served = ended.value.value
        assert [each.card.worker for each in served[queue]] == [worker.name]


async def test_the_reads_end_when_no_request_comes_and_begin_again_with_the_next(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_directory, "REFRESH_S", 0.005)
    async with directory_of(redis_url, queue) as directory:
        for _ in range(2):
            monkeypatch.setattr(queue_directory, "USED_S", 60.0)
            await directory.served()
            assert directory.is_refreshing
            await until_read(directory, directory.n_reads + 2)  # in the background
            monkeypatch.setattr(queue_directory, "USED_S", 0.2)  # no request comes for this time

            async def has_ended() -> bool:
                return not directory.is_refreshing

            await until(has_ended)


async def test_a_request_after_a_pause_waits_for_a_read(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_directory, "REFRESH_S", 3600.0)
    monkeypatch.setattr(queue_directory, "FRESH_S", 3600.0)
    async with directory_of(redis_url, queue) as directory, FakeWorker(redis_url, queue) as worker:
        await directory.served()
        await worker.announce()
        assert not (await directory.served()).get(queue)
        monkeypatch.setattr(queue_directory, "FRESH_S", 0.0)
        assert (await directory.served())[queue]
        assert directory.n_reads == 2


async def test_an_unknown_model_is_looked_up_once_more(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_directory, "REFRESH_S", 3600.0)
    monkeypatch.setattr(queue_directory, "FRESH_S", 3600.0)
    async with directory_of(redis_url, f"{queue}-other") as directory, FakeWorker(redis_url, queue) as worker:
        await directory.served()
        await worker.announce()
        assert (await directory.find(queue)).queue == queue
        assert directory.n_reads == 2


async def test_the_model_and_the_adapters_of_a_queue_are_remembered_while_its_workers_restart(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_directory, "FRESH_S", 0.0)
    style, model = LoraScale(name=f"{queue}.gguf", scale=0.5), f"model of {queue}"
    key, other = (KeyRecord(name="bob", queues=(name,), created_ms=0) for name in (queue, "other"))
    async with (
        directory_of(redis_url, f"{queue}-other") as directory,
        FakeWorker(redis_url, queue, name=queue) as worker,
    ):
        directory.settings = directory.settings.model_copy(update={"accept_any_model": True})
        await announce_card(worker, model=model, lora=(style,))
        assert (await directory.find(style.name)).adapter == style
        await worker.redis.delete(worker.keys.worker(worker.name))
        assert (await directory.served())[queue] == ()
        assert await directory.find(style.name, key) == NamedModel(queue, style)
        assert await directory.find(model) == NamedModel(queue)
        assert (await directory.find(style.name, other)).queue == f"{queue}-other", "the key does not allow the queue"
        assert directory.is_name(model, key)
        assert not directory.is_name(model, other)
        await announce_card(worker, model=model)
        assert await directory.find(style.name) == NamedModel(f"{queue}-other"), "the new worker has no adapter"
        assert directory.is_name(model, key)
        assert not directory.is_name(style.name, key)


async def test_an_outage_ends_the_reads_in_the_background_and_reaches_the_next_request(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_directory, "REFRESH_S", 0.005)
    monkeypatch.setattr(queue_directory, "FRESH_S", 3600.0)
    async with directory_of(redis_url, queue) as directory:
        await directory.served()
        directory.fails = True

        async def has_ended() -> bool:
            return not directory.is_refreshing

        await until(has_ended)
        assert await directory.served() is not None, "what was read last is fresh"
        await until(has_ended)
        monkeypatch.setattr(queue_directory, "FRESH_S", 0.0)
        with pytest.raises(RedisConnectionError):
            await directory.served()
        directory.fails = False
        await asyncio.gather(directory.served(), directory.served())
        assert directory.is_refreshing


async def test_a_read_in_flight_ends_with_the_directory(redis_url: str, queue: str) -> None:
    """Otherwise it would find its connection closed, and connect again."""
    has_begun = asyncio.Event()

    class SilentDirectory(QueueDirectory):
        async def _read(self) -> None:
            has_begun.set()
            await asyncio.Event().wait()

    directory = SilentDirectory(serve_settings(redis_url=redis_url, queue=queue))
    asking = asyncio.create_task(directory.served())
    await has_begun.wait()
    await directory.aclose()
    await asyncio.wait([asking], timeout=10)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def store_partitions(directory: QueueDirectory, queue: str, partitions: int) -> None:
    """Store the settings of a queue, as workers with this number of partitions do."""
    default = directory.default
    for partition in range(partitions):
        config = QueueConfig(partitions, max_queue=0, lease_ms=10_000, model="m", model_name="m")
        fields: Any = config.fields()
        await default.redis.hset(default.keys.config(queue, partition), mapping=fields)


async def found_partitions(directory: QueueDirectory, queue: str) -> int:
    return (await directory.client(queue, waits=True)).settings.partitions


async def test_a_client_that_was_created_before_the_first_worker_gets_its_number_of_partitions(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_directory, "REFRESH_S", 3600.0)
    monkeypatch.setattr(queue_directory, "FRESH_S", 3600.0)
    async with directory_of(redis_url, queue) as directory:
        assert await found_partitions(directory, queue) == 1
        assert await directory.client(queue, waits=True) is await directory.client(queue, waits=True)
        await store_partitions(directory, queue, 4)
        assert await found_partitions(directory, queue) == 4


async def test_a_read_of_the_workers_replaces_a_client_with_another_number_of_partitions(
    redis_url: str, queue: str
) -> None:
    async with directory_of(redis_url, queue) as directory:
        await store_partitions(directory, queue, 1)
        assert await found_partitions(directory, queue) == 1
        await store_partitions(directory, queue, 4)
        await directory.served(is_fresh=True)
        assert await found_partitions(directory, queue) == 4


async def test_a_submit_with_a_wrong_number_of_partitions_is_repeated_with_a_new_client(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_directory, "REFRESH_S", 3600.0)
    monkeypatch.setattr(queue_directory, "FRESH_S", 3600.0)
    async with directory_of(redis_url, queue) as directory:
        await store_partitions(directory, queue, 1)
        stale = await directory.client(queue, waits=True)
        await store_partitions(directory, queue, 4)
        jobs = [{"prompt": "x"}, {"prompt": "y"}]
        generation = Generation(stale, jobs, renew_client=directory.renewed)
        await generation.start()
        assert generation.client.settings.partitions == 4
        assert generation.client is await directory.client(queue, waits=True)
        assert (await directory.depth(queue)).waiting == 2
        await generation.aclose()
        assert await directory.renewed(stale) is generation.client, "a replaced client has one successor"
