"""Starts scripts such as the `llamaq` command as processes that are forked from one that has imported their modules.

So a script does not need a second of processor time for imports. It runs in a process of its own, with its own session,
environment variables, folder, input and output.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

SERVER = Path(__file__).with_name("fork_server.py")


class ForkedProcess:
    """A script that a `ForkServer` has started. The methods and attributes are those of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], stdin: IO[bytes] | None, replies: socket.socket) -> None:
        self.args = list(arguments)
        self.stdin = stdin
        self.returncode: int | None = None
        self._replies = replies
        self.pid = self._receive()

    def poll(self) -> int | None:
        """Return the exit code; None: the process runs. The number of a signal that ended it is negative."""
        if self.returncode is None and select.select([self._replies], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._receive())
            self._replies.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended within `timeout` seconds.
        """
        if self.returncode is None and not select.select([self._replies], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _receive(self) -> int:
        data = self._replies.recv(4)
        assert len(data) == 4, "the fork server has ended"
        return int.from_bytes(data, "big")


class ForkServer:
    """The process that forks scripts. `close` ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, control = socket.socketpair()
        with control:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER)], stdin=control.fileno(), start_new_session=True
            )

    def start(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        variables: dict[str, str],
        output: IO[bytes],
        has_input: bool = False,
    ) -> ForkedProcess:
        """Start a script, whose path is the first argument. If `has_input`, its standard input is a pipe."""
        request = json.dumps({"arguments": list(arguments), "cwd": str(cwd), "variables": variables}).encode()
        replies, of_server = socket.socketpair()
        reading, writing = os.pipe() if has_input else (os.open(os.devnull, os.O_RDONLY), None)
        files = (of_server.fileno(), reading, output.fileno())
        with self._lock, of_server:
            socket.send_fds(self._control, [len(request).to_bytes(4, "big")], files)
            self._control.sendall(request)
        os.close(reading)
        stdin = None if writing is None else os.fdopen(writing, "wb")
        return ForkedProcess(arguments, stdin, replies)

    def close(self) -> None:
        """End the server. The scripts have ended before."""
        self._control.close()
        self._process.wait(60)


@cache
def fork_server() -> ForkServer | None:
    """Return the server of this process. None: coverage is measured, which does not follow forks."""
    if not {"COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"}.isdisjoint(os.environ):
        return None
    server = ForkServer()
    atexit.register(server.close)
    return server


def run_script(arguments: Sequence[str], *, cwd: Path, variables: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """Run a script to its end, and return its exit code and its output. A script that takes longer is killed.

    Raises:
        subprocess.TimeoutExpired: The script has not ended within `timeout_s` seconds.
    """
    with tempfile.TemporaryFile() as output:
        server = fork_server()
        if server is None:
            command = [sys.executable, *arguments]
            code = subprocess.run(
                command, cwd=cwd, env=variables, stdout=output, stderr=output, timeout=timeout_s, check=False
            ).returncode
        else:
            process = server.start(arguments, cwd=cwd, variables=variables, output=output)
            try:
                code = process.wait(timeout_s)
            finally:
                process.kill()
        output.seek(0)
        return code, output.read().decode(errors="replace")
