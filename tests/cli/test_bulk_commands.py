"""`llamaq bulk run` computes the rows of a file, shows its progress, and tells what went wrong."""

from __future__ import annotations

import gzip
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import failing
from tests.support.redis_servers import wait_until
from typer.testing import CliRunner, Result

from llamaq.cli.bulk_progress import details, show_progress
from llamaq.cli.bulk_run_options import read_time
from llamaq.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_ANSWER, EXIT_NO_REDIS, EXIT_USAGE
from llamaq.cli.main import build_app
from llamaq.common.errors import InvalidRequest, LlamaqError
from llamaq.producer import Client
from llamaq.producer.bulk import BulkProgress, BulkState
from llamaq.producer.streaming import pubsub_connection

N_ROWS = 60
MANY_ROWS = 2000
"""To cancel their jobs takes many round trips."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", *({"id": n, "prompt": f"row {n}"} for n in range(1, 4)))


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*args: object, stdin: bytes | None = None) -> Result:
    command = ["bulk", "run", *map(str, args)]
    return CliRunner().invoke(build_app("bulk"), command, input=stdin, catch_exceptions=False)


def answers(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_rows_of_a_file_are_answered(served: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    done = run(source, "-o", target, "--ordered", "--max-tokens", 5, "--json")
    assert done.exit_code == 0, done.output
    assert [(answer["id"], answer["text"]) for answer in answers(target)] == [(n, f"row {n} ") for n in range(1, 4)]
    assert "3/3 rows" in done.stderr
    progress = json.loads(done.stdout)
    assert (progress["state"], progress["rows_done"]) == ("completed", 3)
    again = run(source, "-o", target, "--ordered", "--max-tokens", 5, "--json")
    assert json.loads(again.stdout)["run_id"] == progress["run_id"]
    assert json.loads(again.stdout)["rows_before"] == 3


def test_rows_of_standard_input_are_stored_so_that_the_run_can_continue(
    served: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    stored = tmp_path / "out.jsonl.input.jsonl"

    def pipe(content: bytes) -> Result:
        return run("-", "-o", target, stdin=content)

    for content, problem in ((b"", "is empty"), (gzip.compress(source.read_bytes()), "is compressed")):
        assert f"standard input {problem}" in str(failure_of(partial(pipe, content)))
        assert sorted(tmp_path.iterdir()) == [source]
    (tmp_path / "out.jsonl.input.jsonl.new").write_text("a part that a killed process left")
    assert pipe(source.read_bytes()).exit_code == 0
    assert sorted(answer["id"] for answer in answers(target)) == [1, 2, 3]
    assert stored.read_bytes() == source.read_bytes()
    again = json.loads(run("-", "-o", target, "--json", stdin=source.read_bytes()).stdout)
    assert again["rows_before"] == 3
    other = failure_of(partial(pipe, b'{"prompt": "x"}\n'))
    assert "out.jsonl.input.jsonl has other rows than standard input" in str(other)
    assert stored.read_bytes() == source.read_bytes()
    for path in re.findall(r"[^ ,]+out[^ ,]+", str(other).partition("delete ")[2]):
        Path(path).unlink()
    assert pipe(b'{"prompt": "x"}\n').exit_code == 0
    assert len(answers(target)) == 1
    assert not list(tmp_path.glob("*.new"))


def failure_of(call: Callable[[], object]) -> LlamaqError:
    with pytest.raises(LlamaqError) as caught:
        call()
    return caught.value


@pytest.mark.starts_processes
def test_without_a_pipe_standard_input_is_refused(served: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llamaq", "bulk", "run", "-", "-o", str(tmp_path / "out.jsonl")]
    closed = subprocess.run(["bash", "-c", '"$@" <&-', "-", *command], capture_output=True, check=False)
    assert closed.returncode == EXIT_USAGE
    assert b"standard input has no rows: name a file, or use a pipe" in closed.stderr


def test_an_outage_of_redis_is_not_logged_a_second_time_by_the_subscriber(
    served: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub_connection, "log", logging.getLogger("another_name"))
    assert run(source, "-o", tmp_path / "out.jsonl").exit_code == 0
    assert not pubsub_connection.log.isEnabledFor(logging.WARNING)


def test_failed_rows_are_named_and_the_exit_code_is_1(served: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", {"prompt": "good"}, {"prompt": "bad", "max_tokens": -2})
    done = run(source, "-o", tmp_path / "out.jsonl")
    assert done.exit_code == EXIT_FAILED
    assert f"1 row has failed: {tmp_path / 'out.jsonl.errors.jsonl'}" in done.stderr
    assert "max_tokens" in answers(tmp_path / "out.jsonl.errors.jsonl")[0]["error"]["message"]
    again = run(source, "-o", tmp_path / "out.jsonl", "--retry-errors", "--json")
    progress = json.loads(again.stdout)
    assert (progress["rows_before"], progress["rows_failed"]) == (1, 1)


def test_a_wrong_option_or_file_is_told_in_one_line(
    served: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "out.jsonl")
    for problem, args in {
        "must end with .jsonl": (str(source), "-o", "out.txt"),
        "so name a file, such as -o answers.jsonl": (str(source), "-o", "-"),
        "is not a time": (str(source), "-o", target, "--deadline", "soon"),
        "it is not a file": (str(tmp_path), "-o", target),
        "three different files": (str(source), "-o", str(source)),
        "max_tokens": (str(source), "-o", target, "--max-tokens=-2"),
    }.items():
        assert problem in failing(monkeypatch, capsys, "bulk", "run", *args, code=EXIT_USAGE)


@pytest.mark.starts_processes
def test_a_full_disk_behind_the_progress_does_not_end_the_run(served: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "llamaq", "bulk", "run", str(source), "-o", str(target)]
    with Path("/dev/full").open("wb") as full:
        assert subprocess.call(command, env=os.environ.copy(), stderr=full) == 0
    assert len(answers(target)) == 3


@pytest.mark.starts_processes
def test_a_killed_run_continues_where_it_was(served: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", *({"id": n, "prompt": f"row {n}"} for n in range(1, N_ROWS + 1)))
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "llamaq", "bulk", "run", str(source), "-o", str(target)]
    killed = subprocess.Popen([*command, "--rate", "5"], env=os.environ.copy(), stderr=subprocess.DEVNULL)
    wait_until(lambda: target.exists() and target.stat().st_size, "the first rows")
    killed.kill()
    killed.wait()
    n_before = len(target.read_bytes().splitlines())
    assert 0 < n_before < N_ROWS
    with target.open("ab") as file:
        file.write(b'{"line": 60, "id": 6')  # a line that was not completely written
    done = run(source, "-o", target, "--ordered")
    assert done.exit_code == 0, done.output
    assert [answer["text"] for answer in answers(target)] == [f"row {n} " for n in range(1, N_ROWS + 1)]


@pytest.mark.starts_processes
def test_a_second_ctrl_c_does_not_keep_the_first_from_cancelling_the_jobs(
    redis_url: str, queue: str, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", *({"prompt": "x"} for _ in range(MANY_ROWS)))
    options = ["--window", str(MANY_ROWS), "--redis-url", redis_url, "--queue", queue]
    command = [sys.executable, "-m", "llamaq", "bulk", "run", str(source), "-o", str(tmp_path / "out.jsonl"), *options]
    with Client(redis_url, queue) as client:
        interrupted = subprocess.Popen(command, env=os.environ.copy(), stderr=subprocess.DEVNULL)
        wait_until(lambda: client.queue_depth().waiting == MANY_ROWS, "the jobs of the run")
        interrupted.send_signal(signal.SIGINT)
        wait_until(lambda: client.queue_depth().waiting < MANY_ROWS, "the first cancelled jobs")
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait() == EXIT_INTERRUPTED
        assert client.queue_depth().waiting == 0


def test_a_deadline_is_a_time_or_a_duration() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert read_time("90s", now) == now + timedelta(seconds=90)
    assert read_time("1.5h", now) == now + timedelta(minutes=90)
    assert read_time("2030-12-24T18:00+01:00", now) == datetime(2030, 12, 24, 17, tzinfo=UTC)
    for text in ("8 hours", "999999999d", "99999999d", "9999-12-31T23:59-12:00", "0001-01-01T00:00+12:00"):
        with pytest.raises(InvalidRequest, match="8h"):
            read_time(text, now)


def test_the_progress_names_rate_cached_share_errors_rest_and_notice() -> None:
    progress = BulkProgress(
        run_id="r", rows_failed=2, prompt_tokens=100, cached_tokens=25, tokens_per_s=12.3, eta_s=40, notice="full"
    )
    assert details(progress) == ["12 tokens/s", "25% of the prompts cached", "2 failed", "40s left", "full"]


def test_a_problem_that_comes_and_goes_is_one_line_until_the_next_line_is_due(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with show_progress("out.jsonl") as show:
        for n in range(20):
            show(BulkProgress(run_id="r", rows_done=n, rows_total=20, notice=f"full: {n} jobs wait" if n % 2 else None))
        show(BulkProgress(run_id="r", rows_done=20, rows_total=20, state=BulkState.COMPLETED))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("/")[0] for line in lines] == ["llamaq: 0", "llamaq: 1", "llamaq: 20"]
    assert "full: 1 jobs wait" in lines[1]


def test_retry_errors_deletes_nothing_before_the_run_can_begin(
    served: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(source, {"prompt": "bad", "max_tokens": -2})
    errors = tmp_path / "out.jsonl.errors.jsonl"
    assert run(source, "-o", tmp_path / "out.jsonl").exit_code == EXIT_FAILED
    failed = errors.read_text()
    retry = ("bulk", "run", str(source), "-o", str(tmp_path / "out.jsonl"), "--retry-errors")
    failing(monkeypatch, capsys, *retry, "--redis-url", "redis://127.0.0.1:1", code=EXIT_NO_REDIS)
    failing(monkeypatch, capsys, *retry, "--queue", f"{served}-b", "--require-worker", code=EXIT_NO_ANSWER)
    assert errors.read_text() == failed


@pytest.mark.starts_processes
def test_a_closed_terminal_does_not_end_a_run(served: str, source: Path, tmp_path: Path) -> None:
    """A run of which the shell is disowned survives its terminal. Then each write to it fails with EIO."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "llamaq", "bulk", "run", str(source), "-o", str(tmp_path / "out.jsonl")]
    with subprocess.Popen([*command, "--rate", "1"], stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"out.jsonl" not in shown:
            shown += os.read(ours, 10_000)
        os.close(ours)
        assert process.wait(60) == 0
    assert len(answers(tmp_path / "out.jsonl")) == 3
