"""The processes of a soak: a Redis, and workers that are started, killed and replaced."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.support.forked_scripts import ForkedProcess, fork_server

from llamaq.producer import AsyncClient
from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.local.embedded_redis import EmbeddedRedis
from llamaq.worker.settings import WorkerSettings

CHILD = Path(__file__).with_name("child.py")
POLL_S = 0.02
START_TIMEOUT_S = 60.0
CLIENT_TIMEOUT_S = 90.0
"""Timeout of the clients. A stream without an event for this long counts as lost."""
EVENT_TTL_S = 3600.0
"""The events of ended jobs are stored for this long, because the checker reads them at the end of the soak."""
READY = re.compile(r"worker\.ready id=(\S+)")
KILLED = re.compile(r"^soak\.killed point=(\S+)$", re.MULTILINE)


async def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
    """Wait until `condition` returns a true value, and return this value. Raises `TimeoutError`."""
    deadline_s = time.monotonic() + timeout_s
    while not (seen := condition()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(POLL_S)
    return seen


@dataclass(eq=False)
class WorkerProcess:
    """The process of a worker and the file with its log."""

    process: subprocess.Popen[bytes] | ForkedProcess
    log_file: Path
    faults: dict[str, Any]
    killed_from_outside: bool = False

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def worker_id(self) -> str | None:
        """The id of the worker. None until the worker is ready."""
        found = READY.search(self.log)
        return found[1] if found else None

    async def ready(self) -> str:
        """Wait until the worker is ready, and return its id. Raises `RuntimeError` if the worker process ends first."""

        def id_when_ready() -> str | None:
            if (worker_id := self.worker_id) is None and not self.is_running and not self.killed_at:
                raise RuntimeError(f"a worker ended with {self.process.returncode}:\n{self.log[-3000:]}")
            return worker_id

        ready: str = await wait_until(id_when_ready, f"ready:\n{self.log[-3000:]}")
        return ready

    @property
    def killed_at(self) -> str | None:
        """The point at which the worker killed itself. None if it did not kill itself."""
        found = KILLED.search(self.log[-200:])
        return found[1] if found else None

    def signal(self, number: int) -> None:
        if self.is_running:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the worker by SIGKILL."""
        self.killed_from_outside = True
        self.signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Close the lifeline, kill the worker, and wait for its end."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.signal(signal.SIGKILL)  # SIGKILL also ends a process that SIGSTOP has stopped
        self.process.wait()

    def __repr__(self) -> str:
        return f"<WorkerProcess pid={self.process.pid} returncode={self.process.poll()} faults={self.faults}>"


@dataclass(eq=False)
class Environment:
    """A folder, a Redis, a queue, and the queue's workers. At exit, all processes end and the folder is removed.

    Without `redis_url`, the environment starts a Redis that stores no data on disk.
    """

    redis_url: str = ""
    model: Path | None = None
    """The model file. None: the demo model."""
    queue: str = field(default_factory=lambda: f"soak-{secrets.token_hex(4)}")
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of every worker."""
    workers: list[WorkerProcess] = field(default_factory=list)
    """All workers that were started, including those that have ended."""
    folder: Path = field(init=False)
    _redis: EmbeddedRedis | None = None

    async def __aenter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="lq-soak-"))
        if not self.redis_url:
            self._redis = EmbeddedRedis()
            self._redis.start()
            self.redis_url = self._redis.url
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.close()
        if self._redis is not None:
            self._redis.stop()
        shutil.rmtree(self.folder)

    def use_random_model(self) -> None:
        """From now on, start workers with a tiny random-weight model that never generates an end token."""
        self.model = write_model(self.folder / "random.gguf", PLAIN, seed=1)

    def start(self, faults: dict[str, Any] | None = None, **extra_settings: Any) -> WorkerProcess:
        """Start a worker. `extra_settings` apply to this worker only."""
        chosen: dict[str, Any] = {
            "redis_url": self.redis_url,
            "queue": self.queue,
            "model": str(self.model) if self.model else None,
            "n_threads": 1,
            "heartbeat_s": 0.5,
            **self.settings,
            **extra_settings,
        }
        log_file = self.folder / f"worker-{len(self.workers)}.log"
        with log_file.open("wb") as log:
            process = self._start_child([str(CHILD), json.dumps(faults or {})], log)
        worker = WorkerProcess(process, log_file, faults or {})
        self.workers.append(worker)
        if process.stdin is None:
            raise RuntimeError("a worker without a standard input")
        process.stdin.write(WorkerSettings(**chosen).model_dump_json().encode() + b"\n")
        process.stdin.flush()
        return worker

    def _start_child(self, arguments: list[str], log: IO[bytes]) -> subprocess.Popen[bytes] | ForkedProcess:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_")}
        if server := fork_server():
            return server.start(arguments, cwd=self.folder, variables=variables, output=log, has_input=True)
        return subprocess.Popen(
            [sys.executable, "-P", *arguments],
            cwd=self.folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    async def start_ready(
        self, count: int = 1, faults: dict[str, Any] | None = None, **extra_settings: Any
    ) -> list[WorkerProcess]:
        """Start workers and wait until they are ready."""
        started = [self.start(faults, **extra_settings) for _ in range(count)]
        for worker in started:
            await worker.ready()
        return started

    @property
    def living(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.is_running]

    def worker(self, worker_id: str) -> WorkerProcess:
        """Return the worker with this id. The middle part of a worker id is the process id."""
        pid = int(worker_id.rsplit("-", 2)[1])
        return next(worker for worker in self.workers if worker.process.pid == pid)

    def client(self, url: str | None = None) -> AsyncClient:
        """Return a client of the queue. It connects to `url` instead of `redis_url` if given."""
        return AsyncClient(url or self.redis_url, self.queue, timeout_s=CLIENT_TIMEOUT_S, event_ttl_s=EVENT_TTL_S)
