"""The process of a server that is compared with workers: its start, its log, and its end."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from types import TracebackType
from typing import BinaryIO, Self

from harness import START_TIMEOUT_S
from llamaq.common.errors import LlamaqError

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server. As a context, it stops the server at its end."""

    name: str
    """Name of the server in error messages."""
    process: subprocess.Popen[bytes]
    log: BinaryIO
    """The standard error of the server, and its standard output if that is not a pipe."""

    def await_answer(self, port: int, path: str) -> None:
        """Wait until the server answers a GET of this path.

        Raises:
            LlamaqError: The server ended, or does not answer in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            connection = HTTPConnection(HOST, port, timeout=START_TIMEOUT_S)
            with suppress(OSError, HTTPException):
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
            connection.close()
            time.sleep(POLL_S)
        raise self.start_error()

    def start_error(self) -> LlamaqError:
        """Return the error of a server that did not start, with the end of its log."""
        self.log.seek(0)
        return LlamaqError(f"{self.name} did not start: {self.log.read().decode(errors='replace')[-2000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()  # ends a server that reads its standard input
        else:
            self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()


def start_process(name: str, command: Sequence[str], stdin: int = subprocess.DEVNULL) -> ServerProcess:
    """Start a server.

    Args:
        name: Name of the server in error messages.
        command: The program and its arguments.
        stdin: `subprocess.PIPE` if the server runs until its standard input is closed. Then its standard output is a
            pipe too.

    Raises:
        OSError: The program cannot be started.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115 - the end of the context of the process closes it
    try:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE if stdin == subprocess.PIPE else log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only the benchmark, which stops the server
        )
    except OSError:
        log.close()
        raise
    return ServerProcess(name, process, log)


def free_port() -> int:
    """Return a TCP port that nothing uses now."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
        return port
