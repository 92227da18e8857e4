"""Slot commands through Redis: how a worker receives, refuses and answers them."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.slot_commands import INVALID_NAMES, RecordingHandler, make_command, serving

from llamaq.common.background_tasks import cancel_tasks
from llamaq.common.errors import InvalidRequest, NoWorker, ResultTimeout, SlotCommandRefused
from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_and_worker_state import SlotSnapshot
from llamaq.common.protocol.slot_commands import SlotAction, SlotCommand, SlotFile, SlotReply, WorkerSlots
from llamaq.common.redis.connect import connect
from llamaq.producer import AsyncClient
from llamaq.producer.testing import FakeWorker
from llamaq.worker.broker import command_inbox
from llamaq.worker.broker.command_inbox import MAX_SLOT_COMMAND_BYTES, CommandInbox


async def push_command(url: str, worker: str, data: bytes) -> None:
    redis = connect(url, name="test")
    await redis.rpush(Keys().slot_commands(worker), data)
    await redis.aclose()


async def test_each_call_sends_one_command_and_returns_its_reply(redis_url: str, queue: str) -> None:
    file = SlotFile(name="n", n_tokens=3, n_bytes=9, saved_ms=5)
    slot = SlotSnapshot(index=0, state="idle", content_tokens=7)
    handler = RecordingHandler(lambda _: SlotReply(slots=(slot,), files=(file,), n_tokens=4))
    async with AsyncClient(redis_url, queue) as client, serving(redis_url, queue, handler):
        worker = f"{queue}-w1"
        assert await client.slots() == (WorkerSlots(worker=worker, slots=(slot,), files=(file,)),)
        assert await client.save_slot(1, "n") == file
        assert await client.restore_slot(2, "n", worker=worker) == file
        assert await client.erase_slot(3) == 4
        await client.erase_saved_slot("n")
        assert [(command.action.value, command.slot, command.name) for command in handler.commands] == [
            ("list", None, None),
            ("save", 1, "n"),
            ("restore", 2, "n"),
            ("erase", 3, None),
            ("erase", None, "n"),
        ]
        assert await client.redis.exists(client.keys.slot_commands(worker)) == 0
        reply_keys = [client.keys.reply(command.id) for command in handler.commands]
        assert [await client.redis.exists(key) for key in reply_keys] == [0] * 5


async def test_an_inbox_without_redis_logs_one_warning(
    free_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    n_tries = 0

    def refuse(_: object) -> None:
        nonlocal n_tries
        n_tries += 1
        raise RedisConnectionError("refused")

    monkeypatch.setattr(command_inbox, "RETRY_S", 0.001)
    monkeypatch.setattr(command_inbox, "dedicated_connection", refuse)
    redis = connect(f"redis://127.0.0.1:{free_port}/0", name="test")
    task = asyncio.create_task(CommandInbox(redis, Keys(), "w1", RecordingHandler()).run())
    while n_tries < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await cancel_tasks(task)
    await redis.aclose()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", INVALID_NAMES)
async def test_the_client_refuses_a_name_that_is_a_path_before_it_sends_a_command(
    redis_url: str, queue: str, name: str
) -> None:
    async with AsyncClient(redis_url, queue) as client, serving(redis_url, queue, handler := RecordingHandler()):
        for call in (client.save_slot(0, name), client.restore_slot(0, name), client.erase_saved_slot(name)):
            with pytest.raises(InvalidRequest, match="name"):
                await call
        with pytest.raises(InvalidRequest, match="slot"):
            await client.erase_slot(-1)
        assert handler.commands == []


async def test_with_several_workers_the_caller_must_name_one(redis_url: str, queue: str) -> None:
    one, two = RecordingHandler(), RecordingHandler()
    async with AsyncClient(redis_url, queue) as client:
        with pytest.raises(NoWorker):
            await client.slots()
        with pytest.raises(NoWorker):
            await client.erase_slot(0)
        async with serving(redis_url, queue, one, "w1"), serving(redis_url, queue, two, "w2"):
            with pytest.raises(InvalidRequest, match=f"2 workers serve queue.*name one of: {queue}-w1, {queue}-w2"):
                await client.erase_slot(0)
            with pytest.raises(InvalidRequest, match="'w3' does not serve queue"):
                await client.erase_slot(0, worker="w3")
            await client.erase_slot(0, worker=f"{queue}-w2")
            assert (len(one.commands), len(two.commands)) == (0, 1)
            assert [found.worker for found in await client.slots()] == [f"{queue}-w1", f"{queue}-w2"]
            assert [found.worker for found in await client.slots(worker=f"{queue}-w1")] == [f"{queue}-w1"]
            assert one.commands[-1].id != two.commands[-1].id


async def test_a_command_that_no_worker_reads_in_time_is_not_executed(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client:
        async with FakeWorker(redis_url, queue, name=f"{queue}-w1") as silent:
            await silent.announce()
            with pytest.raises(ResultTimeout, match="not replied within"):
                await client.erase_slot(0, timeout=0.05)
        assert 0 < await client.redis.pttl(client.keys.slot_commands(f"{queue}-w1")) <= 60_050
        async with serving(redis_url, queue, handler := RecordingHandler()):
            await client.slots()
        assert [command.action for command in handler.commands] == [SlotAction.LIST]


async def test_another_clock_of_another_node_does_not_expire_a_command(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def time_of_another_node() -> tuple[int, int]:
        return 1, 0

    async with AsyncClient(redis_url, queue) as client, serving(redis_url, queue, handler := RecordingHandler()):
        monkeypatch.setattr(client.redis, "time", time_of_another_node)
        await client.slots(timeout=5)
        assert [command.action for command in handler.commands] == [SlotAction.LIST]


async def test_a_client_does_not_wait_for_a_worker_that_has_ended(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue, name=f"{queue}-w1") as worker:
        await worker.announce()
        asking = asyncio.create_task(client.erase_slot(0))
        while not await client.redis.exists(client.keys.slot_commands(worker.name)):  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.01)
        await worker.redis.delete(worker.keys.worker(worker.name))
        with pytest.raises(SlotCommandRefused, match="ended, or its heartbeat stopped"):
            await asking


async def test_invalid_and_repeated_commands_are_dropped_and_the_worker_continues(redis_url: str, queue: str) -> None:
    def answer(command: SlotCommand) -> SlotReply:
        if command.slot == 5:
            raise ZeroDivisionError
        if command.slot == 6:
            raise PermissionError(13, "Permission denied", "/secret/place")
        if command.slot == 7:
            raise SlotCommandRefused("no, because")
        return SlotReply()

    async with AsyncClient(redis_url, queue) as client, serving(redis_url, queue, handler := RecordingHandler(answer)):
        worker = f"{queue}-w1"
        twice = codec.encode_model(make_command())
        path = codec._pack({**make_command(action="save", slot=0, name="x").model_dump(mode="json"), "name": "../x"})
        nonsense = [b"", b"\xc1", codec._pack([1]), codec._pack({"id": "x"}), bytes(MAX_SLOT_COMMAND_BYTES + 1), path]
        for data in (*nonsense, twice, twice):
            await push_command(redis_url, worker, data)
        for slot, complaint in ((5, "a defect of the worker"), (6, "--cache-dir.*Permission denied$"), (7, "because")):
            with pytest.raises(SlotCommandRefused, match=complaint):
                await client.erase_slot(slot)
        await client.slots()
        assert [command.slot for command in handler.commands] == [None, 5, 6, 7, None]
