"""Slot commands through Redis: how a worker receives, refuses, executes and answers them."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from typer.testing import CliRunner

from llamaq.cli.main import build_app, main
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
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.engine_loop.output_mailbox import Message
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.kv_cache.cached_prefix_index import RadixPrefixCache
from llamaq.worker.kv_cache.offload_interface import NoOffload
from llamaq.worker.slot_files.command_handler import SlotCommandHandler
from llamaq.worker.slot_files.engine_thread_operations import SlotOperations
from llamaq.worker.slot_files.saved_slot_store import SavedSlotFiles
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler

INVALID_NAMES = ["", "a/b", "../x", "a.slot", ".", "a b", "x" * 65, "ä", "a\n", "a\0"]
PROMPT = [1 + at % 200 for at in range(200)]


class RecordingHandler:
    """Records every command, and replies with the result of `answer`."""

    def __init__(self, answer: Callable[[SlotCommand], SlotReply] = lambda _: SlotReply()) -> None:
        self.commands: list[SlotCommand] = []
        self._answer = answer

    async def execute(self, command: SlotCommand) -> SlotReply:
        self.commands.append(command)
        return self._answer(command)


@asynccontextmanager
async def serving(url: str, queue: str, handler: Any, name: str = "w1") -> AsyncIterator[None]:
    """Announce a worker and run its command inbox until the end of the block."""
    async with FakeWorker(url, queue, name=f"{queue}-{name}") as worker:
        await worker.announce()
        task = asyncio.create_task(CommandInbox(worker.redis, worker.keys, worker.name, handler).run())
        try:
            yield
        finally:
            await cancel_tasks(task)


async def push_command(url: str, worker: str, data: bytes) -> None:
    redis = connect(url, name="test")
    await redis.rpush(Keys().slot_commands(worker), data)
    await redis.aclose()


def make_command(**values: Any) -> SlotCommand:
    rest = {"id": secrets.token_hex(16), "action": "list", "deadline_ms": 2**50}
    return SlotCommand.model_validate(rest | values)


# ---- through Redis


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


# ---- executed by the slot command handler


class FakeEngineWorker:
    """A worker with a fake engine and an engine thread, without Redis."""

    def __init__(self, folder: Path | None, model: str = "model") -> None:
        self.engine = FakeEngine(n_ctx=1000, n_batch=256, n_seq_max=9)
        memory = make_memory(self.engine, cache=RadixPrefixCache(), similarity=0.1)
        self.scheduler = make_scheduler(self.engine, memory, chunk_size=64)
        saved = SavedSlotFiles(folder, model, max_file_bytes=10**7) if folder else None
        self.shared = SharedState()
        self.ticks = TickLoop(self.scheduler, self.engine, self.shared, hang_s=60, capacity=4)
        self.handler = SlotCommandHandler(self.ticks, SlotOperations(memory, self.engine.sequences, NoOffload()), saved)
        self._thread = threading.Thread(target=self.ticks.run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ticks.stop(0)
        self._thread.join()
        self.handler.close()
        self.scheduler.check_integrity()

    async def run(self, prompt: list[int] = PROMPT, salt: str = "") -> int:
        """Run a job in slot 0 until it ends. Returns the number of prompt tokens that came from the cache."""
        ended = asyncio.get_running_loop().create_future()
        job = make_job(prompt, max_tokens=5, slot=0)
        job.scope = Scope(salt)

        def receive(messages: Sequence[Message]) -> None:
            for message in messages:
                if isinstance(message, JobEnded):
                    ended.set_result(message.stats.prefix_cache_tokens)

        self.shared.outputs.attach(receive)
        self.ticks.admit([job])
        n_cached: int = await ended
        return n_cached

    async def command(self, action: str, slot: int | None = None, name: str | None = None) -> SlotReply:
        return await self.handler.execute(make_command(action=action, slot=slot, name=name))


async def test_a_saved_state_is_restored_by_another_worker(tmp_path: Path) -> None:
    with FakeEngineWorker(tmp_path) as one:
        await one.run(salt="tenant")
        [saved] = (await one.command("save", 0, "story")).files
        assert (saved.name, saved.n_tokens, saved.is_usable) == ("story", 204, True)
        assert b"tenant" not in (tmp_path / "slots" / "story.slot").read_bytes()
    with FakeEngineWorker(tmp_path) as other:
        listed = await other.command("list")
        saved = saved.model_copy(update={"duration_ms": None})
        assert listed.files == (saved,)
        assert [slot.content_tokens for slot in listed.slots] == [0, 0]
        [restored] = (await other.command("restore", 1, "story")).files
        assert restored.duration_ms
        assert restored.model_copy(update={"duration_ms": None}) == saved
        assert [slot.content_tokens for slot in (await other.command("list")).slots] == [0, 204]
        assert await other.run() == 0
        assert await other.run(salt="tenant") == 199
        assert (await other.command("erase", name="story")).files == ()
        assert (await other.command("list")).files == ()
        with pytest.raises(InvalidRequest, match="no slot state is saved as 'story'"):
            await other.command("restore", 1, "story")
        with pytest.raises(InvalidRequest, match="no slot state"):
            await other.command("erase", name="story")


async def test_erase_returns_the_number_of_tokens_of_the_slot(tmp_path: Path) -> None:
    with FakeEngineWorker(tmp_path) as worker:
        assert await worker.run() == 0
        assert await worker.run() == 199
        assert (await worker.command("erase", 0)).n_tokens == 205
        assert await worker.run() == 0


async def test_a_file_of_another_model_or_a_damaged_file_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    with FakeEngineWorker(tmp_path) as one:
        await one.run()
        await one.command("save", 0, "story")
    with FakeEngineWorker(tmp_path, model="another") as other:
        [file] = (await other.command("list")).files
        assert not file.is_usable
        with pytest.raises(InvalidRequest, match="another model"):
            await other.command("restore", 0, "story")
    path = tmp_path / "slots" / "story.slot"
    whole = path.read_bytes()
    with FakeEngineWorker(tmp_path) as one:
        for data in (whole[:-1], whole[:100], b"", whole[:-60] + b"\1" + whole[-59:]):
            path.write_bytes(data)
            with pytest.raises(InvalidRequest, match="damaged"):
                await one.command("restore", 0, "story")
        state = SavedSlotFiles(tmp_path, "model", max_file_bytes=10**7)
        for meta in ({}, {"namespace": "zz", "public": 0}, {"namespace": "00", "public": 0}, {"namespace": 5}):
            state.write("odd", meta, bytes(40), b"")
            with pytest.raises(InvalidRequest, match="'odd' is damaged"):
                await one.command("restore", 0, "odd")
        state.write("odd", {"namespace": "00" * 32, "public": 0}, bytes(40), b"short")
        with pytest.raises(InvalidRequest, match="'odd' is damaged"):
            await one.command("restore", 0, "odd")
        assert await one.run() == 0


async def test_without_a_cache_folder_every_command_except_list_is_refused() -> None:
    with FakeEngineWorker(None) as worker:
        await worker.run()
        listed = await worker.command("list")
        assert [slot.content_tokens for slot in listed.slots] == [205, 0]
        for action, slot, name in (("save", 0, "x"), ("restore", 0, "x"), ("erase", 0, None), ("erase", None, "x")):
            with pytest.raises(SlotCommandRefused, match="--cache-dir"):
                await worker.command(action, slot, name)
        assert await worker.run() == 199


async def test_a_save_raises_the_error_of_a_disk_that_refuses_writes(tmp_path: Path) -> None:
    (tmp_path / "slots").write_text("in the way")
    with FakeEngineWorker(tmp_path) as worker:
        await worker.run()
        with pytest.raises(OSError, match="File exists"):
            await worker.command("save", 0, "story")
        assert (await worker.command("erase", 0)).n_tokens == 205


@pytest.mark.parametrize(
    "values",
    [
        {"action": "save", "name": "x"},
        {"action": "restore", "slot": 0},
        {"action": "erase"},
        {"action": "erase", "slot": 0, "name": "x"},
        {"action": "list", "slot": 0},
        {"action": "dance"},
        {"action": "save", "slot": 256, "name": "x"},
        {"action": "save", "slot": 0, "name": "x", "id": "../x"},
        *({"action": "save", "slot": 0, "name": name} for name in INVALID_NAMES),
    ],
)
def test_a_command_with_an_invalid_combination_of_fields_is_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        make_command(**values)


@pytest.mark.parametrize("name", [*INVALID_NAMES, "a", "A-b_9", "x" * 64])
def test_commands_and_files_allow_the_same_names(name: str, tmp_path: Path) -> None:
    try:
        SavedSlotFiles(tmp_path, "model", max_file_bytes=10**6).write(name, {}, b"", b"")
    except InvalidRequest:
        assert name in INVALID_NAMES
    else:
        assert make_command(action="erase", name=name).name == name


# ---- from the command line


@contextmanager
def serving_in_thread(url: str, queue: str, handler: RecordingHandler) -> Iterator[None]:
    """Run `serving` in a thread, for tests with blocking code."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    is_over = asyncio.Event()

    async def serve() -> None:
        async with serving(url, queue, handler):
            ready.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        loop.close()


def llamaq(*args: str) -> str:
    result = CliRunner().invoke(build_app(args[0]), args, catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def test_the_cli_lists_saves_restores_and_erases(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LLAMAQ_REDIS_URL", redis_url), ("LLAMAQ_QUEUE", queue), ("COLUMNS", "160")):
        monkeypatch.setenv(name, value)
    file = SlotFile(name="story", n_tokens=345, n_bytes=678, saved_ms=1_700_000_000_000, is_usable=False)
    slot = SlotSnapshot(index=0, state="decode", job_id="some-job", cached_tokens=819, content_tokens=912)
    timed = file.model_copy(update={"duration_ms": 12.34})

    def reply(command: SlotCommand) -> SlotReply:
        files = (file,) if command.action is SlotAction.LIST else (timed,)
        return SlotReply(slots=(slot,), files=files, n_tokens=77)

    handler = RecordingHandler(reply)
    with serving_in_thread(redis_url, queue, handler):
        table = llamaq("slots", "list")
        for shown in (f"{queue}-w1", "decode", "some-job", "819", "912", "story", "345", "678", "2023-11-14", "no"):
            assert shown in table
        assert WorkerSlots.model_validate_json(llamaq("slots", "list", "--json")).files == (file,)
        assert llamaq("slots", "save", "story", "--slot", "3").strip() == "saved 345 tokens, 678 bytes, in 12.3 ms"
        saved = llamaq("slots", "save", "story", "--slot", "3", "--worker", f"{queue}-w1", "--json")
        assert SlotFile.model_validate_json(saved) == timed
        assert (
            llamaq("slots", "restore", "story", "--slot", "2").strip() == "restored 345 tokens, 678 bytes, in 12.3 ms"
        )
        assert json.loads(llamaq("slots", "restore", "story", "--slot", "2", "--json"))["n_tokens"] == 345
        assert llamaq("slots", "erase", "--slot", "1").strip() == "erased 77 tokens"
        assert llamaq("slots", "erase", "story").strip() == "erased"
        erased = json.loads(llamaq("slots", "erase", "--slot", "1", "--json"))
        assert erased == {"name": None, "slot": 1, "n_tokens": 77}
    assert [command.slot for command in handler.commands] == [None, None, 3, 3, 2, 2, 1, None, 1]


def test_the_cli_reports_an_error_in_one_line(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    for args, complaint, code in (
        (["save", "../x", "--slot", "0"], "name", 2),
        (["save", "x", "--slot", "0"], "no worker", 4),
        (["erase", "a.b"], "name", 2),
    ):
        monkeypatch.setattr(sys, "argv", ["llamaq", "slots", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1
    for args in (["erase"], ["erase", "x", "--slot", "0"], ["save", "x"]):
        assert CliRunner().invoke(build_app("slots"), ["slots", *args]).exit_code == 2
