"""`llamaq up` and `llamaq demo` start everything in one command, and leave no process behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from redis import Redis
from tests.lifecycle.conftest import TIMEOUT_S

from llamaq.cli.exit_codes import EXIT_NO_REDIS
from llamaq.producer import Client, Job
from llamaq.worker.local.embedded_redis import EmbeddedRedis

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Command, Environment, Reader


@pytest.fixture
def up(environment: Environment, free_port: int) -> Command:
    """A running `llamaq up` on a free port, whose worker is ready."""
    started = environment.start("up", "--port", str(free_port), "--queue", environment.queue, "--no-http")
    started.await_output(r"worker\.ready id=\S+ queue=\S+ slots=\d+ compiled=(True|False)")
    return started


def test_up_prints_an_example_command_that_works_and_ends_everything_at_sigint(
    environment: Environment, up: Command
) -> None:
    example = up.await_output(r"Try: +(llamaq generate .*)")[1]
    command = environment.run(["bash", "-c", f"PATH={Path(sys.executable).parent}:$PATH; {example} --max-tokens 8"])
    assert command.end() == 0, command.output
    assert len(command.output.strip()) > 5
    assert "No --model given" in up.output
    assert "until this command ends; --data-dir keeps it" in up.output
    assert any("redis-server" in line for line in environment.running_processes().values())
    assert_ends_all(environment, up, os.kill, signal.SIGINT)


@pytest.mark.parametrize(
    ("send_signal", "number"),
    [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM), (os.killpg, signal.SIGHUP)],
    ids=["a terminal's Ctrl-C", "SIGTERM", "the close of its terminal"],
)
def test_up_ends_all_processes_that_it_started(
    environment: Environment, up: Command, send_signal: Callable[[int, int], None], number: signal.Signals
) -> None:
    assert_ends_all(environment, up, send_signal, number)


def assert_ends_all(
    environment: Environment, up: Command, send_signal: Callable[[int, int], None], number: signal.Signals
) -> None:
    """Send the signal, and assert that `up` ends all processes that it started."""
    send_signal(up.pid, number)
    assert up.end() == 0
    assert not environment.running_processes()
    assert "worker.stopped" in up.output
    assert "Traceback" not in up.output


def test_up_serves_http_and_restarts_the_server_when_it_dies(environment: Environment, free_port: int) -> None:
    queue = environment.queue
    up = environment.start("up", "--port", str(free_port), "--queue", queue, "--http-port", "0")
    url = up.await_output(r"HTTP: +(http://\S+)")[1]
    body = {"prompt": "Once upon a time", "n_predict": 4}
    for _ in range(2):
        answer = httpx.post(f"{url}/completion", json=body, timeout=60)  # waits for the worker, and for the server
        assert answer.json()["tokens_predicted"] == 4
        (pid,) = [pid for pid, line in environment.running_processes().items() if "llamaq.gateway" in line]
        os.kill(pid, signal.SIGKILL)
    up.signal(signal.SIGKILL)
    up.end()
    environment.await_no_process(timeout_s=20)


def test_no_process_outlives_an_up_that_is_killed(environment: Environment, up: Command) -> None:
    assert len(environment.running_processes()) >= 3
    up.signal(signal.SIGKILL)
    up.end()
    environment.await_no_process(timeout_s=20)


def test_up_stores_its_data_in_the_data_dir(environment: Environment, free_port: int) -> None:
    arguments = ("up", "--port", str(free_port), "--queue", environment.queue, "--data-dir", "data", "--no-http")
    url = f"redis://127.0.0.1:{free_port}/0"
    first = environment.start(*arguments)
    first.await_output("worker.ready")
    with Client(url, environment.queue) as client:
        job = client.submit("Once upon a time", max_tokens=5)
        text = job.result().text
    first.signal(signal.SIGTERM)
    assert first.end() == 0
    second = environment.start(*arguments)
    second.await_output("worker.ready")
    with Client(url, environment.queue) as client:
        assert client.job(job.id).result().text == text


def redis_pid(environment: Environment) -> int:
    (pid,) = (pid for pid, line in environment.running_processes().items() if "redis-server" in line)
    return pid


def kill_and_await_end(pid: int) -> None:
    """Kill a process, and wait until all its threads have ended: until then, its port is in use."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended, _, _ = select.select([descriptor], [], [], TIMEOUT_S)
        assert ended, f"process {pid} has not ended"
    finally:
        os.close(descriptor)


def start_paced_up(environment: Environment, port: int, *arguments: str, **variables: str) -> Command:
    """Start `llamaq up` with a worker of one slot and at most 100 ticks a second, and wait until it is ready."""
    variables = environment.worker_variables(LLAMAQ_N_PARALLEL="1", **variables)
    del variables["LLAMAQ_REDIS_URL"]
    up = environment.start("up", "--port", str(port), "--no-http", *arguments, **variables)
    up.await_output("worker.ready")
    return up


@pytest.mark.parametrize("arguments", [(), ("--data-dir", "data")], ids=["private folder", "data-dir"])
def test_up_restarts_a_killed_redis_with_its_jobs_and_no_stream_has_a_gap(
    environment: Environment, free_port: int, read: Callable[[Job], Reader], arguments: tuple[str, ...]
) -> None:
    up = start_paced_up(environment, free_port, *arguments, LINGER_TOKENS="30")
    with Client(f"redis://127.0.0.1:{free_port}/0", environment.queue) as client:
        jobs = [client.submit(f"Story {number}", max_tokens=60, ignore_eos=True) for number in range(6)]
        readers = [read(job) for job in jobs]
        readers[0].await_tokens(10)
        for n_kills in (1, 2):
            os.kill(redis_pid(environment), signal.SIGKILL)
            up.await_output("redis.started", count=1 + n_kills)
        environment.let_jobs_finish()
        results = [reader.finish() for reader in readers]
    assert [len(result.tokens) for result in results] == [60] * 6
    assert "redis.died" in up.output
    up.signal(signal.SIGTERM)
    assert up.end() == 0
    assert not environment.running_processes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_that_is_stopped_while_it_starts_leaves_nothing_behind(
    environment: Environment, free_port: int, number: signal.Signals
) -> None:
    folder = environment.folder / "t"
    folder.mkdir()
    up = environment.start("up", "--port", str(free_port), "--http-port", "0", TMPDIR=str(folder))
    up.await_output("redis.started")
    up.signal(number)
    assert up.end() == 0
    assert not environment.running_processes()
    assert not list(folder.iterdir())
    assert "Traceback" not in up.output


def test_up_ends_with_the_reason_when_its_redis_cannot_be_restarted(environment: Environment, free_port: int) -> None:
    up = start_paced_up(environment, free_port)
    up.signal(signal.SIGSTOP)  # so that the other server gets the port before `up` restarts its own
    kill_and_await_end(redis_pid(environment))
    with EmbeddedRedis(port=free_port):
        up.signal(signal.SIGCONT)
        assert up.end() == EXIT_NO_REDIS
    assert up.output.splitlines()[-1].startswith(f"llamaq: port {free_port} is in use")
    assert "Traceback" not in up.output
    assert not environment.running_processes()


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_up_starts_no_redis_if_a_redis_url_is_given(environment: Environment, by: str) -> None:
    arguments, variables = (
        (["--redis-url", environment.redis_url], {})
        if by == "flag"
        else ([], {"LLAMAQ_REDIS_URL": environment.redis_url})
    )
    up = environment.start("up", "--queue", environment.queue, "--no-http", *arguments, **variables)
    up.await_output("worker.ready")
    with environment.client() as client:
        assert client.generate("Once upon a time", max_tokens=8).text.strip()
    assert not any("redis-server" in line for line in environment.running_processes().values())
    assert "embedded" not in up.output
    assert "Redis: the server of --redis-url (LLAMAQ_REDIS_URL)" in up.output
    up.signal(signal.SIGINT)
    assert up.end() == 0
    with Redis.from_url(environment.redis_url) as redis:
        assert redis.ping()


def test_a_port_in_use_is_reported_in_one_line(environment: Environment, free_port: int) -> None:
    with EmbeddedRedis(port=free_port):
        up = environment.start("up", "--port", str(free_port), "--no-http")
        assert up.end() == EXIT_NO_REDIS
    (line,) = (line for line in up.output.splitlines() if not line.startswith("No --model given"))
    assert line.startswith(f"llamaq: port {free_port} is in use: choose another with --port")
    assert f"--redis-url redis://127.0.0.1:{free_port}/0" in line


def test_up_ends_when_its_worker_cannot_start(environment: Environment, free_port: int) -> None:
    up = environment.start("up", "--port", str(free_port), "--no-http", "--model", "no-such-file.gguf")
    assert up.end() == 2
    assert "--model: there is no file 'no-such-file.gguf'" in up.output
    assert not environment.running_processes()


def test_the_demo_prints_lines_and_stats_if_its_output_is_not_a_terminal(environment: Environment) -> None:
    began_s = time.monotonic()
    demo = environment.start("demo", COLUMNS="80")
    assert demo.end(timeout_s=60) == 0
    assert time.monotonic() - began_s < 60
    assert not environment.running_processes()
    lines = demo.output.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in demo.output
    titles = {line.partition(" | ")[0].strip() for line in lines if " | " in line}
    assert len(titles) == 8
    for title in titles:
        row = next(line.split() for line in lines if line.strip().startswith(title) and " | " not in line)
        assert row[-1] in ("stop", "length")
        assert int(row[-7]) > 0, "new tokens"
    story = [line.partition(" | ")[2] for line in lines if line.strip().startswith("A girl named Mia |")]
    assert len(" ".join(story)) > 100
    assert re.search(r"8 jobs together: \d+ tokens", demo.output)


def test_the_demo_continues_when_its_redis_is_killed(environment: Environment) -> None:
    demo = environment.start("demo", "--jobs", "12", COLUMNS="80", **environment.pace_variables(LINGER_TOKENS="30"))
    demo.await_output(r" \| ")
    os.kill(redis_pid(environment), signal.SIGKILL)
    environment.let_jobs_finish()
    assert demo.end() == 0, demo.output
    assert re.search(r"12 jobs together: \d+ tokens", demo.output)
    assert "Traceback" not in demo.output
    assert not environment.running_processes()


class Terminal:
    """A command that runs in a pseudo-terminal, and all output that it writes there."""

    def __init__(
        self, environment: Environment, arguments: list[str], columns: int, lines: int, **variables: str
    ) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        chosen = {"TERM": "xterm-256color", **environment.pace_variables(), **variables}
        variables = environment.process_variables(chosen)
        del variables["COLUMNS"]
        self.process = subprocess.Popen(
            arguments,
            cwd=environment.folder,
            env=variables,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._drawn = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def drawn(self) -> str:
        return self._drawn.decode(errors="replace")

    def _read(self) -> None:
        with suppress(OSError):  # Linux raises this error when the other end is closed
            while data := os.read(self._ours, 65536):
                self._drawn += data

    def await_drawn(self, text: str) -> None:
        deadline = time.monotonic() + 30
        while text not in self.drawn:
            assert time.monotonic() < deadline, self.drawn
            time.sleep(0.005)

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join()
        os.close(self._ours)
        return code


@pytest.fixture
def demo_in_terminal(environment: Environment) -> Callable[..., Terminal]:
    llamaq = str(Path(sys.executable).with_name("llamaq"))

    def start(*options: str, **variables: str) -> Terminal:
        return Terminal(environment, [llamaq, "demo", *options], columns=80, lines=24, **variables)

    return start


def test_the_demo_draws_panels_that_fit_a_small_terminal(
    environment: Environment, demo_in_terminal: Callable[..., Terminal]
) -> None:
    terminal = demo_in_terminal()
    assert terminal.end() == 0
    assert not environment.running_processes()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.drawn)
    tops = [line for line in drawn.splitlines() if line.startswith("╭")]
    assert len(tops) >= 3 * 4, "too few frames of two panels in four rows"
    assert {len(line) for line in tops} == {80}
    for title in ("A girl named Mia", "Who has what?"):
        assert any(title in line for line in tops)
    assert re.search(r"\d+ tokens/s · \d/8 slots", drawn)
    assert "8 jobs together" in drawn
    ups = re.findall(r"(?:\x1b\[2K\x1b\[1A)+", terminal.drawn)
    assert max(up.count("\x1b[1A") for up in ups) < 24, "a frame was higher than the terminal"


def test_an_interrupted_demo_in_a_terminal_of_ascii_leaves_no_process_behind(
    environment: Environment, demo_in_terminal: Callable[..., Terminal]
) -> None:
    # With about 100 ticks a second, the jobs take some 10 s. The terminal has no characters for borders and spinners.
    terminal = demo_in_terminal("--jobs", "64", PYTHONIOENCODING="ascii")
    terminal.await_drawn("tokens/s ? ")
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 130
    assert not environment.running_processes()
    assert "Redis and the worker have been stopped" in terminal.drawn
    assert "Traceback" not in terminal.drawn


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_demo_that_receives_a_signal(environment: Environment, number: signal.Signals) -> None:
    demo = environment.start("demo", "--jobs", "64", **environment.pace_variables())
    demo.await_output(r" \| ")
    demo.signal(number)
    assert demo.end() == (130 if number == signal.SIGTERM else -9)
    environment.await_no_process(timeout_s=20)
    assert "Traceback" not in demo.output


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_demo_whose_model_cannot_be_loaded_prints_the_reason(environment: Environment, by: str) -> None:
    (environment.folder / "broken.gguf").write_bytes(b"this is no model")
    demo = (
        environment.start("demo", "--model", "broken.gguf")
        if by == "flag"
        else environment.start("demo", LLAMAQ_MODEL="broken.gguf")
    )
    assert demo.end() == 2
    assert "8 slots, broken.gguf." in demo.output
    printed = " ".join(demo.output.split())  # the console wraps long lines of the log at spaces
    assert "the worker cannot start; its log:" in printed
    assert "broken.gguf is not a GGUF file" in printed
    assert not environment.running_processes()
