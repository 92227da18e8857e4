"""`generate` and `chat` in a terminal: Ctrl-C, conversations, line editing and narrow tables."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.support.command_line import submit
from tests.support.terminal import CTRL_C, CTRL_D, Terminal
from tests.support.worker_cards import KilledWorker

from llamaq.cli.line_history import history_file, line_editing
from llamaq.producer import Client, FinishReason, JobState
from llamaq.producer.testing import FakeAttempt, FakeWorker

pytestmark = pytest.mark.starts_processes


@pytest.fixture
def selected(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The queue that the commands use by default. Their files are written to the folder of this test."""
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return queue


@asynccontextmanager
async def listed_worker(redis_url: str, queue: str) -> AsyncGenerator[FakeWorker, None]:
    async with FakeWorker(redis_url, queue) as worker:
        await worker.announce()
        yield worker


async def emit_until_cancelled(attempt: FakeAttempt) -> None:
    while (await attempt.emit([1], "")).code != "cancel":
        pass
    await attempt.finish(FinishReason.CANCELLED)


async def run(call: object, *args: object) -> object:
    return await asyncio.to_thread(call, *args)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [("generate", "x"), ("chat", "x", "--json")])
async def test_ctrl_c_cancels_the_job_and_ends_the_command_without_a_traceback(
    redis_url: str, selected: str, arguments: tuple[str, ...]
) -> None:
    async with listed_worker(redis_url, selected) as worker:
        with Terminal(*arguments) as terminal:
            attempt = await worker.start_next()
            if "--json" not in arguments:
                await attempt.emit([1], "some text")
                await run(terminal.read_until, "some text")
            terminal.press(CTRL_C)
            await emit_until_cancelled(attempt)
            assert await run(terminal.end) == 130
            assert "Traceback" not in terminal.output
            assert "Error" not in terminal.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("arguments", [("generate", "x"), ("chat", "x", "--json"), ("chat",)])
async def test_a_signal_cancels_the_job_and_ends_the_command(
    redis_url: str, selected: str, arguments: tuple[str, ...], number: signal.Signals
) -> None:
    async with listed_worker(redis_url, selected) as worker:
        with Terminal(*arguments) as terminal:
            if arguments == ("chat",):
                await run(terminal.read_until, "> ")
                terminal.press("hello\r")
            attempt = await worker.start_next()
            for _ in range(2):  # a shell that ends sends SIGHUP too
                os.kill(terminal.process.pid, number)
            await emit_until_cancelled(attempt)
            assert await run(terminal.end) == 128 + number
            assert "Traceback" not in terminal.output


async def test_ctrl_c_ends_a_command_that_waits_for_a_worker(redis_url: str, selected: str) -> None:
    with Terminal("generate", "x") as terminal:
        await run(terminal.read_until, f"no worker serves queue '{selected}'")
        with Client(redis_url, selected) as client:
            while not (waiting := client.jobs()):
                pass
            terminal.press(CTRL_C)
            assert await run(terminal.end) == 130
            assert client.job(waiting[0].job_id).status().finish_reason is FinishReason.CANCELLED
        assert "Traceback" not in terminal.output


def test_ctrl_c_at_a_question_does_nothing(redis_url: str, selected: str) -> None:
    submit(redis_url, selected)
    with Terminal("purge") as terminal:
        terminal.read_until("Cancel 1 waiting job of queue")
        assert terminal.interrupt() == 130
    with Client(redis_url, selected) as client:
        assert client.queue_depth().waiting == 1


async def test_ctrl_c_does_not_cancel_a_job_that_is_only_followed(redis_url: str, selected: str) -> None:
    job_id = submit(redis_url, selected)
    with Terminal("stream", job_id) as terminal:
        await run(terminal.read_until, "no worker serves")
        terminal.press(CTRL_C)
        assert await run(terminal.end) == 130
    with Client(redis_url) as client:
        status = client.job(job_id).status()
    assert (status.state, status.cancel_requested) == (JobState.QUEUED, False)


async def test_ctrl_c_in_an_answer_ends_the_answer_and_a_second_one_the_conversation(
    redis_url: str, selected: str
) -> None:
    async with listed_worker(redis_url, selected) as worker:
        with Terminal("chat") as terminal:
            await run(terminal.read_until, "> ")
            terminal.press("first\r")
            attempt = await worker.start_next()
            await attempt.emit([1], "half an answer")
            await run(terminal.read_until, "half an answer")
            terminal.press(CTRL_C)
            await emit_until_cancelled(attempt)
            await run(terminal.read_until, "> ")
            terminal.press("second\r")
            attempt = await worker.start_next()
            assert [message.content for message in attempt.request.messages or ()] == [
                "first",
                "half an answer",
                "second",
            ]
            await attempt.answer(["a whole answer"])
            await run(terminal.read_until, "a whole answer")
            await run(terminal.read_until, "> ")
            assert await run(terminal.interrupt) == 130
            assert "Traceback" not in terminal.output


async def test_a_conversation_longer_than_the_context_drops_its_oldest_exchanges(redis_url: str, selected: str) -> None:
    async with listed_worker(redis_url, selected) as worker:
        with Terminal("chat", "--system", "be brief") as terminal:

            async def talk(message: str, *, fits: bool, longest: int) -> list[str]:
                """Send a message, and return the contents of the first request with at most `longest` messages."""
                await run(terminal.read_until, "> ")
                terminal.press(f"{message}\r")
                while True:
                    attempt = await worker.start_next()
                    contents = [one.content for one in attempt.request.messages or ()]
                    if fits and len(contents) <= longest:
                        await attempt.answer([f"answer to {message}"])
                        return contents
                    await attempt.fail("prompt_too_long", "the prompt is too long")
                    if len(contents) <= longest:
                        return contents

            for message in ("one", "two", "three"):
                await talk(message, fits=True, longest=6)
            assert await talk("four", fits=True, longest=4) == ["be brief", "three", "answer to three", "four"]
            await run(terminal.read_until, "the 2 oldest exchanges were dropped")
            await run(terminal.read_until, "answer to four")
            assert await talk("too long", fits=False, longest=2) == ["be brief", "too long"]
            await run(terminal.read_until, "prompt_too_long")
            assert len(await talk("five", fits=True, longest=6)) == 6  # the earlier exchanges were not forgotten
            await run(terminal.read_until, "> ")
            terminal.press(CTRL_D)
            assert await run(terminal.end) == 0


async def test_a_conversation_goes_on_after_a_failed_answer(redis_url: str, selected: str) -> None:
    async with listed_worker(redis_url, selected) as worker:
        with Terminal("chat") as terminal:
            await run(terminal.read_until, "> ")
            terminal.press("\rfirst\r")  # the empty line is no message
            await (await worker.start_next()).fail("chat_template", "the roles must alternate")
            await run(terminal.read_until, "the roles must alternate")
            await run(terminal.read_until, "> ")
            terminal.press("second\r")
            attempt = await worker.start_next()
            assert [message.content for message in attempt.request.messages or ()] == ["second"]
            await attempt.answer(["fine"])
            await run(terminal.read_until, "fine")


def test_a_conversation_continues_until_ctrl_d(served: str, selected: str) -> None:
    with Terminal("chat") as terminal:
        terminal.read_until("> ")
        terminal.press("hello\r")
        terminal.read_until("user: hello")
        terminal.read_until("> ")
        terminal.press("again\r")
        terminal.read_until("assistant: user: hello")
        terminal.read_until("user: again")
        terminal.read_until("> ")
        terminal.press(CTRL_D)
        assert terminal.end() == 0


@pytest.mark.parametrize("keeps_history", [True, False])
def test_lines_can_be_edited_and_recalled_in_the_next_conversation(
    served: str, selected: str, tmp_path: Path, keeps_history: bool
) -> None:
    options = () if keeps_history else ("--no-history",)
    with Terminal("chat", *options) as terminal:
        terminal.read_until("> ")
        terminal.press("hxllo\x1b[D\x1b[D\x1b[D\x7fe\r")  # three steps to the left, backspace
        terminal.read_until("user: hello")
        terminal.read_until("> ")
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    file = tmp_path / "llamaq" / "chat_history"
    assert file.exists() == keeps_history
    if keeps_history:
        assert file.read_text() == "hello\n"
        assert file.stat().st_mode & 0o077 == 0
        with Terminal("chat", *options) as terminal:
            terminal.read_until("> ")
            terminal.press("\x1b[A\r")  # arrow up
            terminal.read_until("user: hello")


def test_a_user_without_a_home_has_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with line_editing(keeps_history=True):
        pass


def test_the_history_file_is_in_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert history_file() == tmp_path / ".local" / "state" / "llamaq" / "chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_file() == Path("/state/llamaq/chat_history")


def test_tables_fit_80_columns_and_no_id_is_cut(redis_url: str, selected: str) -> None:
    worker_id = "a-host-with-a-long-name-12345-abcdef"

    async def announce() -> str:
        async with KilledWorker(redis_url, selected, name=worker_id) as worker:
            await worker.announce()
            with Client(redis_url, selected) as client:
                await asyncio.to_thread(client.submit, "x")
                attempt = await worker.start_next()
                await attempt.answer(["x"])
                waiting = await asyncio.to_thread(client.submit, "x")
            return waiting.id

    job_id = asyncio.run(announce())
    for command, expected in (("stats", worker_id), ("jobs", job_id)):
        with Terminal(command, columns=80) as terminal:
            assert terminal.end() == 0
        assert expected in terminal.output
        for line in terminal.output.splitlines():
            assert len(line.rpartition("  ")[0]) <= 80, line  # only the last cell of a row may be longer
