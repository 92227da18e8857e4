"""llamaq's commands as real processes, which tests signal, kill and restart. No process may outlive its test.

Every process of a test has the test's folder as its working directory. So the test finds every process that is still
running at its end, even one whose parent has ended.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked_scripts import ForkedProcess, fork_server

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Event, Failed, Finished, Tokens
from llamaq.common.protocol.keys import Keys
from llamaq.common.redis.connect import connect
from llamaq.producer import Chunk, Client, Job, Result
from llamaq.worker.local.embedded_redis import EmbeddedRedis

LLAMAQ = Path(sys.executable).with_name("llamaq")
TIMEOUT_S = 60.0
STREAM_TIMEOUT_S = 120.0
"""The longest streams of the tests take 20 s on an idle machine, and a minute beside other tests on a slow one."""
"""Much longer than any step takes on an idle machine."""
EVENT_TTL_S = 600.0
"""The events of ended jobs are stored for this long, so that tests can read them."""
POLL_S = 0.02
LEASE_S = 1
OUTPUT_TAIL_CHARS = 6000


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Wait until `condition` returns a true value, and return this value."""
    deadline = time.monotonic() + timeout_s
    while not (seen := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)
    return seen


@dataclass(eq=False)
class Command:
    """A running command and the file with its output."""

    process: subprocess.Popen[bytes] | ForkedProcess
    file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """All output of the command and its children to stdout and stderr."""
        return self.file.read_text(errors="replace")

    def await_output(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait until the output has `count` matches of a pattern, and return match number `count`."""

        def matches() -> list[re.Match[str]]:
            found = list(re.finditer(pattern, self.output))
            assert found or self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            return found[count - 1 :]

        match: re.Match[str] = wait_until(matches, f"{pattern!r} in\n{self.output}")[0]
        return match

    @property
    def worker_id(self) -> str:
        """The id of the worker that this command runs."""
        return self.await_output(r"worker\.ready id=(\S+)")[1]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait until the command ends, and return its exit code."""
        return self.process.wait(timeout_s)

    def __repr__(self) -> str:
        return f"<Command {self.process.args!r} pid={self.pid} returncode={self.process.poll()}>"


@dataclass
class Environment:
    """The folder of one test, and the processes in it."""

    folder: Path
    redis_url: str
    queue: str
    commands: list[Command] = field(default_factory=list)

    def start(self, *arguments: str, **variables: str) -> Command:
        """Run `llamaq` with these arguments. `variables` are added to its environment variables."""
        return self.start_script(LLAMAQ, *arguments, **variables)

    def start_script(self, script: Path, *arguments: str, **variables: str) -> Command:
        """Run a Python script. `variables` are added to its environment variables."""
        server = fork_server()
        if server is None:
            return self.run([sys.executable, str(script), *arguments], **variables)
        file = self._next_output
        with file.open("wb") as output:
            process = server.start(
                [str(script), *arguments], cwd=self.folder, variables=self.process_variables(variables), output=output
            )
        self.commands.append(Command(process, file))
        return self.commands[-1]

    def run(self, arguments: list[str], **variables: str) -> Command:
        """Start a program whose working directory is this environment's folder."""
        file = self._next_output
        with file.open("wb") as output:
            process = subprocess.Popen(
                arguments,
                cwd=self.folder,
                env=self.process_variables(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.commands.append(Command(process, file))
        return self.commands[-1]

    @property
    def _next_output(self) -> Path:
        return self.folder / f"output-{len(self.commands)}.txt"

    def process_variables(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the environment variables of a command: `variables`, and those of pytest except llamaq's settings.

        Temporary files are written to the folder of this environment.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_")}
        return {**inherited, "TMPDIR": str(self.folder), "LLAMAQ_N_THREADS": "1", "COLUMNS": "120", **variables}

    def worker_variables(self, **variables: str) -> dict[str, str]:
        """Return the settings of a worker with short leases and about 100 ticks a second, as environment variables."""
        own = {
            "LLAMAQ_REDIS_URL": self.redis_url,
            "LLAMAQ_QUEUE": self.queue,
            "LLAMAQ_LEASE_S": str(LEASE_S),
            "LLAMAQ_HEARTBEAT_S": "0.2",
        }
        return own | self.pace_variables(**variables)

    def pace_variables(self, **variables: str) -> dict[str, str]:
        """Return the environment variables of a worker with about 100 ticks a second, and `variables`.

        `tests/support/child_processes/paced.py` tells what TICK_S and LINGER_TOKENS mean.
        """
        return {"LLAMAQ_BATCH_STRATEGY": "paced:Paced"} | variables

    def start_worker(self, *arguments: str, wait: bool = True, supervised: bool = False, **variables: str) -> Command:
        """Start a worker with the settings of `worker_variables`. If `wait` is true, wait until the worker is ready."""
        supervision = "--supervise" if supervised else "--no-supervise"
        worker = self.start("worker", supervision, *arguments, **self.worker_variables(**variables))
        if wait:
            worker.await_output("worker.ready")
        return worker

    def let_jobs_finish(self) -> None:
        """End the long ticks of the workers that have LINGER_TOKENS."""
        (self.folder / "may-finish").touch()

    def client(self) -> Client:
        return Client(self.redis_url, self.queue, timeout_s=TIMEOUT_S, event_ttl_s=EVENT_TTL_S)

    def events_of(self, job: Job) -> list[Event]:
        """Return the stored events of a job that has ended. `check_events` has checked them."""
        entries = asyncio.run(self._read_stream(Keys().of_job(job.id).events))
        events = [codec.decode_event(fields[b"e"]) for _, fields in entries]
        check_events(events)
        return events

    async def _read_stream(self, key: str) -> Any:
        redis = connect(self.redis_url, name="test")
        try:
            entries: Any = await redis.xrange(key)
            return entries
        finally:
            await redis.aclose()

    def running_processes(self) -> dict[int, str]:
        """Return the command line of every process in this folder, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(self.folder):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace").strip()
            except OSError:  # the process has ended, or belongs to another user
                continue
        return found

    def await_no_process(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until no process is left in this folder."""
        wait_until(
            lambda: not self.running_processes(),
            f"the end of all processes; these still run: {self.running_processes()}",
            timeout_s,
        )

    def end_commands(self) -> None:
        """Stop the commands that still run, and wait until all commands have ended."""
        for command in self.commands:
            if command.process.poll() is None:
                command.signal(signal.SIGTERM)
                command.signal(signal.SIGCONT)
        for command in self.commands:
            command.end()

    def close(self) -> None:
        """Stop the commands that still run, and fail if another process of the test is still running afterwards."""
        try:
            self.end_commands()
            self.await_no_process()
        finally:
            for pid in self.running_processes():
                os.kill(pid, signal.SIGKILL)


def check_events(events: Sequence[Event]) -> None:
    """Assert that offsets have no gap and no repeat, and that exactly the last event is a terminal event."""
    n_tokens = n_chars = 0
    for event in events:
        if isinstance(event, Tokens):
            assert (event.offset, event.text_offset) == (n_tokens, n_chars)
            n_tokens += len(event.tokens)
            n_chars += len(event.text)
    endings = [place for place, event in enumerate(events) if isinstance(event, Finished | Failed)]
    assert endings == [len(events) - 1]


class Reader(threading.Thread):
    """A thread that reads the stream of a job, as a web backend does."""

    def __init__(self, job: Job) -> None:
        super().__init__(name=f"reader of {job.id}", daemon=True)
        self.job = job
        self.chunks: list[Chunk] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for chunk in self.job.stream():
                self.chunks.append(chunk)
        except Exception as exc:  # noqa: BLE001  # `finish` raises it again
            self.error = exc

    @property
    def n_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def await_tokens(self, count: int) -> None:
        """Wait until the reader has read `count` tokens."""
        wait_until(lambda: self.n_tokens >= count, f"{count} tokens of {self.job.id} are read")
        assert self.is_alive(), "the job ended before the test could disturb it"

    def finish(self) -> Result:
        """Wait until the job ends, check that its result equals the chunks that were read, and return the result."""
        self.join(STREAM_TIMEOUT_S)
        assert not self.is_alive(), f"the stream has not ended after {self.n_tokens} tokens"
        if self.error is not None:
            raise self.error
        offsets = [chunk.offset for chunk in self.chunks]
        lengths = [len(chunk.tokens) for chunk in self.chunks]
        assert offsets == [sum(lengths[:place]) for place in range(len(lengths))]
        result = self.job.result(timeout=TIMEOUT_S)
        assert result.tokens == tuple(token for chunk in self.chunks for token in chunk.tokens)
        assert result.text == self.text
        return result


Read = Callable[[Job], Reader]
"""Begins to read the stream of a job."""


_environments: list[Environment] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        commands = [command for environment in _environments for command in environment.commands]
        report.sections += [(repr(command), command.output[-OUTPUT_TAIL_CHARS:]) for command in commands]
    return report


@pytest.fixture
def read() -> Read:
    return Reader


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: the path of a Unix socket in it can have at most 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="lq-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def environment(redis_server: EmbeddedRedis, folder: Path) -> Iterator[Environment]:
    """The environment of one test. Its commands are stopped after the test, which fails if a process is left."""
    opened = Environment(folder, redis_server.url, f"life-{secrets.token_hex(4)}")
    _environments.append(opened)
    try:
        yield opened
        opened.close()
    finally:
        _environments.remove(opened)
