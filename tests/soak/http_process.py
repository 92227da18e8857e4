"""Processes of `llamaq serve` for scenarios."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from tests.soak.environment import Environment, wait_until
from tests.support.forked_scripts import ForkedProcess, fork_server

from llamaq.gateway.settings import serve_settings
from llamaq.gateway.uvicorn_server import bind, url_of


@dataclass(eq=False)
class HttpProcess:
    """A process of the HTTP server. It ends when its standard input is closed."""

    url: str
    process: subprocess.Popen[bytes] | ForkedProcess
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def memory_mb(self) -> float:
        """The memory that the process holds."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))

    @property
    def n_connections(self) -> int:
        """The number of connections of clients that the server has not closed."""
        port = f":{urlsplit(self.url).port or 0:04X}"
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        # man 5 proc_pid_net: field 2 is the local address, field 4 the state (0A: listening), field 10 the inode, which
        # is 0 when no process has the socket any more.
        return sum(field[1].endswith(port) and field[3] != "0A" and field[9] != "0" for field in lines)

    def kill(self) -> None:
        """Kill the server by SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Let the server stop, and wait for its end."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


async def start_http(environment: Environment, **settings: Any) -> HttpProcess:
    """Start a server of the environment's queue, and wait until it answers. The caller closes it."""
    own = {"redis_url": environment.redis_url, "queue": environment.queue, "http_port": 0, "shutdown_s": 0}
    chosen = serve_settings(**{**own, **settings})
    log_file = environment.folder / f"http-{len(list(environment.folder.glob('http-*')))}.log"
    with bind(chosen) as listening, log_file.open("wb") as log:
        url, fd = url_of(chosen, listening), listening.fileno()
        process = _start_child(environment.folder, fd, log)
    server = HttpProcess(url, process, log_file)
    if process.stdin is None:
        raise RuntimeError("a server without a standard input")
    process.stdin.write(chosen.model_dump_json().encode() + b"\n")
    process.stdin.flush()

    def is_ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{server.log[-3000:]}")
        return "Application startup complete" in server.log

    await wait_until(is_ready, "an HTTP server")
    return server


def _start_child(folder: Path, listening_fd: int, log: IO[bytes]) -> subprocess.Popen[bytes] | ForkedProcess:
    arguments = ["-P", "-m", "llamaq.gateway.child_main", str(listening_fd)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LLAMAQ_")}
    if server := fork_server():
        return server.start(
            arguments, cwd=folder, variables=variables, output=log, has_input=True, pass_fds=(listening_fd,)
        )
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(listening_fd,),
        start_new_session=True,
    )
