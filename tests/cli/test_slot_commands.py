"""The commands `llamaq slots`: their output, and an error in one line."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.slot_commands import RecordingHandler, serving
from typer.testing import CliRunner

from llamaq.cli.main import build_app, main
from llamaq.common.protocol.queue_and_worker_state import SlotSnapshot
from llamaq.common.protocol.slot_commands import SlotAction, SlotCommand, SlotFile, SlotReply, WorkerSlots


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


def test_the_commands_list_save_restore_and_erase(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_error_is_reported_in_one_line(
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
