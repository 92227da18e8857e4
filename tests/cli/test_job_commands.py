"""The commands for jobs, with a fake worker."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.command_line import failing, llamaq, submit
from tests.support.development_mode import command, complaints, environment, is_slow_step
from typer.testing import CliRunner

from llamaq.cli.main import build_app, main
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import Client, FinishReason, JobParams, Result, auto_cancelled_jobs
from llamaq.producer.auto_cancelled_jobs import AutoCancelledJobs
from llamaq.producer.call_timeout import CallTimeout
from llamaq.producer.testing import FakeWorker, serving

MAIN = "from llamaq.cli.main import main; main()"


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
        "max_tokens": "9", "min_tokens": "2", "temperature": "0.5", "top_k": "3", "top_p": "0.9", "min_p": "0.1",
        "typical_p": "0.8",
        "top_n_sigma": "2", "xtc_probability": "0.1", "xtc_threshold": "0.2", "dynatemp_range": "0.3",
        "dynatemp_exponent": "2",
        "repeat_penalty": "1.1", "frequency_penalty": "0.2", "presence_penalty": "0.3", "penalty_last_n": "5",
        "dry_multiplier": "0.8", "dry_base": "1.5", "dry_allowed_length": "3", "dry_penalty_last_n": "-1",
        "dry_sequence_breakers": "x", "mirostat": "2", "mirostat_tau": "4", "mirostat_eta": "0.2",
        "adaptive_target": "0.5", "adaptive_decay": "0.8", "min_keep": "2", "samplers": "kpt",
        "seed": "11", "logit_bias": '{"4": -1.5}', "lora": '{"0": 0.5}',
        "json_schema": f"@{schema}", "grammar_root": "start",
        "n_indent": "2", "generation_timeout_s": "8",
        "timeout_s": "30", "queue_timeout_s": "60", "deadline_s": "90", "priority": "bulk", "idempotency_key": "k",
        "metadata": '{"user": "u"}', "cache_salt": "salt", "tenant": "acme", "logprobs": "2", "prompt_logprobs": "1",
        "cache_public": "5", "slot": "1", "run_at": "2020-12-24T18:00+01:00", "retries": "3",
        "reasoning_budget": "7", "reasoning_open": "<r>", "reasoning_close": "</r>",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "draft_max": "3",
    }  # fmt: skip
    flags = [
        "--special",
        "--ignore-eos",
        "--include-stop",
        "--post-sampling-probs",
        "--no-cache-prompt",
        "--no-stream",
        "--cancel-on-disconnect",
        "--prompt-progress",
        "--stop",
        "one",
        "--stop",
        "two",
        "--stop-token-ids",
        "4",
        "--stop-token-ids",
        "5",
        "--allowed-token-ids",
        "6",
        "--bad-words",
        "seven",
    ]
    options = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), value)]
    arguments = ["submit", "x", "--redis-url", redis_url, "--queue", queue, *options, *flags]
    assert CliRunner().invoke(build_app("submit"), arguments, catch_exceptions=False).exit_code == 0

    async def start_next() -> JobRequest:
        async with FakeWorker(redis_url, queue) as worker:
            return (await worker.start_next()).request

    request = asyncio.run(start_next())
    assert (request.max_tokens, request.temperature, request.logit_bias) == (9, 0.5, {4: -1.5})
    assert (request.json_schema, request.stop, request.metadata) == ({"type": "object"}, ("one", "two"), {"user": "u"})
    assert (request.stop_token_ids, request.allowed_token_ids) == ((4, 5), (6,))
    assert (request.cache_salt, request.cache_public, request.slot) == ("salt", 5, 1)
    assert (request.cache_prompt, request.stream, request.cancel_on_disconnect) == (False, False, True)
    changed = {
        name for name in JobParams.model_fields if getattr(request, name) != JobParams.model_fields[name].default
    }
    not_allowed = {"grammar", "regex", "choice", "lark", "delay_s"}  # with json_schema and run_at
    not_allowed |= {"tools", "add_generation_prompt", "continue_final_message"}  # without a chat
    assert JobParams.model_fields.keys() - changed == not_allowed


def test_a_job_is_submitted_followed_and_shown(served: str) -> None:
    job_id = llamaq("submit", "one two").strip()
    assert llamaq("result", job_id) == "one two \n"
    assert Result.model_validate_json(llamaq("result", job_id, "--json")).job_id == job_id
    assert llamaq("stream", job_id) == "one two \n"
    chunks = [json.loads(line) for line in llamaq("stream", job_id, "--json").splitlines()]
    assert "".join(chunk["text"] for chunk in chunks) == "one two "
    assert (chunks[0]["index"], chunks[0]["offset"]) == (0, 0)
    assert re.search(r"state +finished", llamaq("status", job_id))
    assert json.loads(llamaq("status", job_id, "--json"))["generated_tokens"] == 2
    assert llamaq("cancel", job_id) == "the job had already ended\n"
    assert json.loads(llamaq("cancel", job_id, "--json")) == {"job_id": job_id, "cancelled": False}


def test_submit_prints_json(served: str) -> None:
    first = json.loads(llamaq("submit", "one", "--json", "--idempotency-key", "k"))
    again = json.loads(llamaq("submit", "one", "--json", "--idempotency-key", "k"))
    assert (first["is_new"], again["is_new"]) == (True, False)
    assert first["job_id"] == again["job_id"]


def test_cancel_ends_a_waiting_job(redis_url: str, queue: str) -> None:
    job_id = submit(redis_url, queue)
    assert llamaq("cancel", job_id, "--redis-url", redis_url) == "cancelled\n"
    with Client(redis_url) as client:
        assert client.job(job_id).result().finish_reason is FinishReason.CANCELLED


@pytest.fixture
def unserved(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The default queue of the commands. No worker serves it."""
    monkeypatch.setenv("LLAMAQ_REDIS_URL", redis_url)
    monkeypatch.setenv("LLAMAQ_QUEUE", queue)
    return queue


@pytest.mark.parametrize("name", ["generate", "chat", "submit"])
def test_with_require_worker_a_queue_without_a_worker_is_an_error(
    unserved: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    error = failing(monkeypatch, capsys, name, "x", "--require-worker", code=4)
    assert f"no worker serves queue '{unserved}'; start one with: llamaq worker --queue {unserved}" in error
    with Client(redis_url, unserved) as client:
        assert client.jobs() == ()


def test_a_queue_without_a_worker_is_noticed_at_once_and_an_error_at_the_timeout(
    unserved: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # On a busy machine, only the wait for the first chunk ends in time, not the submit and the search for a worker.
    monkeypatch.setattr(AutoCancelledJobs, "new_limit", lambda *_: CallTimeout(60.0))
    monkeypatch.setattr(auto_cancelled_jobs, "LAST_WAIT_S", 10.0)
    monkeypatch.setattr(sys, "argv", ["llamaq", "generate", "x", "--wait-s", "0.05"])
    with pytest.raises(SystemExit) as caught:
        main()
    notice, error = capsys.readouterr().err.splitlines()
    assert caught.value.code == 4
    assert f"no worker serves queue '{unserved}'" in notice
    assert "the job waits for a worker" in notice
    assert f"no worker serves queue '{unserved}'" in error


@pytest.mark.parametrize("arguments", [("generate", "x"), ("result",)])
def test_a_command_that_waits_for_a_worker_prints_a_notice_and_goes_on(
    redis_url: str, unserved: str, arguments: tuple[str, ...]
) -> None:
    given = [*arguments, *([submit(redis_url, unserved)] if arguments == ("result",) else [])]
    process = subprocess.Popen(
        command(MAIN, *given), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True
    )
    assert process.stderr is not None
    line = next(line for line in process.stderr if not is_slow_step(line))
    assert f"no worker serves queue '{unserved}'" in line
    with serving(redis_url, unserved, lambda _: ["the ", "answer"]):
        output, errors = process.communicate(timeout=60)
    assert "the answer" in output
    assert complaints(errors) == []
    assert process.returncode == 0


@pytest.mark.parametrize("arguments", [("stream",), ("result",), ("result", "--json")])
def test_the_text_of_a_cancelled_job_is_incomplete_which_the_exit_code_says(
    served: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
) -> None:  # fmt: skip
    with Client(redis_url, f"{served}-2") as client:
        job = client.submit("x")
        client.purge()
    name, *options = arguments
    monkeypatch.setattr(sys, "argv", ["llamaq", name, job.id, *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "llamaq: the job was cancelled before its end\n"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_the_exit_code_says_that_a_generated_text_is_incomplete(
    served: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:  # fmt: skip
    with Client(redis_url, served) as client:
        client.pause()
    monkeypatch.setattr(sys, "argv", ["llamaq", "generate", "x", "--queue-timeout-s", "0.01", *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "llamaq: the job reached its time limit before its end\n"


def test_a_real_process_streams_token_by_token(redis_url: str, queue: str) -> None:
    job_id = submit(redis_url, queue)
    process = subprocess.Popen(
        command(MAIN, "stream", job_id, "--redis-url", redis_url), stdout=subprocess.PIPE, env=environment()
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


def test_standard_input_that_is_not_utf_8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert "standard input: the text is not utf-8" in failing(monkeypatch, capsys, "generate", "-", code=2)


@pytest.mark.parametrize("command", [("generate", "-"), ("chat",), ("submit", "-"), ("embed",), ("rerank", "query")])
def test_a_closed_standard_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: str, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in failing(monkeypatch, capsys, *command, code=2)
