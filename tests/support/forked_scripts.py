"""Starts scripts such as the `llamaq` command as processes that are forked from one that has imported their modules.

So a script does not need a second of processor time for imports. It runs in a process of its own, with its own session,
environment variables, folder, input and output.
"""

from __future__ import annotations

import atexit
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

from tests.support.forked_children import FIRST_OWN_FD, NewProcess, send

ROOT = Path(__file__).resolve().parents[2]
SPACE_FOR_COMMAND = "-" * 1000
"""An argument of the fork server: its processes write their command lines over it."""


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
                [sys.executable, "-m", "tests.support.fork_server", SPACE_FOR_COMMAND],
                cwd=ROOT,
                stdin=control.fileno(),
                start_new_session=True,
            )

    def start(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        variables: dict[str, str],
        output: IO[bytes],
        errors: IO[bytes] | None = None,
        has_input: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> ForkedProcess:
        """Start a script, or a module if the first argument is `-m`.

        Args:
            arguments: What follows the interpreter in the command line.
            cwd: The working directory of the script.
            variables: All environment variables of the script.
            output: The file for its output.
            errors: The file for its standard error. None: `output`.
            has_input: Whether its standard input is a pipe.
            pass_fds: File descriptors below 200 that the script gets with the same numbers.
        """
        assert max(pass_fds, default=0) < FIRST_OWN_FD
        numbers = [(number,) for number in (0, 1, 2, *pass_fds)]
        process = NewProcess([sys.executable, *arguments], str(cwd), variables, numbers)
        reading, writing = os.pipe() if has_input else (os.open(os.devnull, os.O_RDONLY), None)
        stdin = None if writing is None else os.fdopen(writing, "wb")
        try:
            return self._start(process, (reading, output.fileno(), (errors or output).fileno(), *pass_fds), stdin)
        finally:
            os.close(reading)

    def start_on_terminal(
        self, arguments: Sequence[str], *, cwd: Path, variables: dict[str, str], terminal: int
    ) -> ForkedProcess:
        """Start a script or a module with a controlling terminal, which is a file descriptor."""
        files = [(0, 1, 2)]
        process = NewProcess([sys.executable, *arguments], str(cwd), variables, files, has_terminal=True)
        return self._start(process, (terminal,), None)

    def _start(self, process: NewProcess, files: Sequence[int], stdin: IO[bytes] | None) -> ForkedProcess:
        replies, of_server = socket.socketpair()
        with self._lock, of_server:
            send(self._control, process, [of_server.fileno(), *files])
        return ForkedProcess(process.command[1:], stdin, replies)

    def close(self) -> None:
        """End the server. The scripts have ended before."""
        self._control.close()
        self._process.wait(60)


@cache
def fork_server() -> ForkServer | None:
    """Return the server of this process. None: coverage is measured, or a GPU is used, and neither follows forks."""
    if not {"COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "LLAMAQ_TEST_GPU"}.isdisjoint(os.environ):
        return None
    server = ForkServer()
    atexit.register(server.close)
    return server


def run_script(
    arguments: Sequence[str], *, cwd: Path, variables: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, and return its exit code and its output. A script that takes longer is killed.

    Raises:
        subprocess.TimeoutExpired: The script has not ended within `timeout_s` seconds.
    """
    server = fork_server()
    if server is None:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = server.start(arguments, cwd=cwd, variables=variables, output=output, errors=errors)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        for file in (output, errors):
            file.seek(0)
        written = [file.read().decode(errors="replace") for file in (output, errors)]
        return subprocess.CompletedProcess([sys.executable, *arguments], code, *written)
