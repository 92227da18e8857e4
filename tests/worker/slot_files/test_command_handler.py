"""Slot commands that a worker with a fake engine executes: save, restore, list and erase."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from tests.support.slot_commands import INVALID_NAMES, make_command

from llamaq.common.errors import InvalidRequest, SlotCommandRefused
from llamaq.common.protocol.slot_commands import SlotReply
from llamaq.worker.core.cache_scope import Scope
from llamaq.worker.core.outputs import JobEnded
from llamaq.worker.engine_loop.output_mailbox import Message
from llamaq.worker.engine_loop.shared_state import SharedState
from llamaq.worker.engine_loop.tick_loop import TickLoop
from llamaq.worker.kv_cache.offload_interface import NoOffload
from llamaq.worker.kv_cache.radix_prefix_cache import RadixPrefixCache
from llamaq.worker.slot_files import command_handler
from llamaq.worker.slot_files.command_handler import SlotCommandHandler
from llamaq.worker.slot_files.saved_slot_files import SavedSlotFiles
from llamaq.worker.slot_files.slot_operations import SlotOperations
from llamaq.worker.slot_files.slot_restorer import SlotRestore, SlotRestorer
from llamaq.worker.testing import FakeEngine, make_job, make_memory, make_scheduler

PROMPT = [1 + at % 200 for at in range(200)]


class FakeEngineWorker:
    """A worker with a fake engine and an engine thread, without Redis."""

    def __init__(self, folder: Path | None, model: str = "model") -> None:
        self.engine = FakeEngine(n_ctx=1000, n_batch=256, n_seq_max=9)
        memory = make_memory(self.engine, cache=RadixPrefixCache(), similarity=0.1)
        self.scheduler = make_scheduler(self.engine, memory, chunk_size=64)
        saved = SavedSlotFiles(folder, model, max_file_bytes=10**7) if folder else None
        self.shared = SharedState()
        self.ticks = TickLoop(self.scheduler, self.engine, self.shared, hang_s=60, capacity=4)
        self.handler = SlotCommandHandler(
            self.ticks.commands, SlotOperations(memory, self.engine.sequences, NoOffload()), saved
        )
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


async def test_a_restore_that_begins_when_the_time_for_room_ends_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SlotRestorer.begin

    def begin_late(restorer: SlotRestorer, *args: Any) -> SlotRestore | None:
        restore = begin(restorer, *args)
        time.sleep(0.2)
        return restore

    monkeypatch.setattr(command_handler, "ROOM_TIMEOUT_S", 0.1)
    with FakeEngineWorker(tmp_path) as one:
        await one.run()
        await one.command("save", 0, "story")
    with FakeEngineWorker(tmp_path) as other:
        monkeypatch.setattr(SlotRestorer, "begin", begin_late)
        assert (await other.command("restore", 1, "story")).files[0].n_tokens == 204
        assert await other.run() == 199


async def test_a_restore_is_refused_when_no_room_becomes_free_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_handler, "ROOM_TIMEOUT_S", 0.1)
    with FakeEngineWorker(tmp_path) as worker:
        await worker.run()
        await worker.command("save", 0, "story")
        monkeypatch.setattr(SlotRestorer, "begin", lambda *_: None)
        with pytest.raises(SlotCommandRefused, match=r"no room for the state became free within 0\.1 s"):
            await worker.command("restore", 0, "story")


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
