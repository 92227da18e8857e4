"""Runs `llamaq` commands in a pseudo-terminal, as a user sees them."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.forked_scripts import ForkedProcess, fork_server

TIMEOUT_S = 60.0
CTRL_C = "\x03"
CTRL_D = "\x04"


class Terminal:
    """A `llamaq` command whose controlling terminal is a pseudo-terminal, so that keys such as Ctrl-C work.

    Args:
        *arguments: The arguments of `llamaq`.
        columns: The width of the terminal.
        folder: The working directory of the command. None: the one of this process.
        **variables: Environment variables of the command, in addition to those of this process.
    """

    def __init__(self, *arguments: str, columns: int = 80, folder: Path | None = None, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        chosen = {**environment, "TERM": "dumb", **variables}
        self.process = self._start(["-m", "llamaq", *arguments], folder, chosen, theirs)
        os.close(theirs)
        self.output = ""
        """Everything that the command has written."""
        self._n_read = 0

    @staticmethod
    def _start(
        arguments: list[str], folder: Path | None, variables: dict[str, str], terminal: int
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        if server := fork_server():
            return server.start_on_terminal(arguments, cwd=folder or Path.cwd(), variables=variables, terminal=terminal)
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=variables,
            preexec_fn=partial(os.login_tty, terminal),  # noqa: PLW1509  # the function makes only system calls
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def read_until(self, text: str) -> str:
        """Wait until the command has written `text` after the last text of `read_until`. Returns what came before."""
        while text not in self.output[self._n_read :]:
            assert self._read(), f"{text!r} is not in {self.output!r}"
        before, _, _ = self.output[self._n_read :].partition(text)
        self._n_read += len(before) + len(text)
        return before

    def press(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._ours, keys.encode())

    def interrupt(self) -> int:
        """Press Ctrl-C while the command waits for a line, and return the exit code.

        The key is pressed again until the command ends: a signal between the output of a question and the read of its
        answer is noticed only at the next key.
        """
        while True:
            self.press(CTRL_C)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=2)
                return self.end()

    def end(self) -> int:
        """Read the output to its end, and return the exit code."""
        while self._read():
            pass
        return self.process.wait(TIMEOUT_S)

    def _read(self) -> bool:
        """Read some output. Returns False when the command has closed its terminal."""
        assert select.select([self._ours], [], [], TIMEOUT_S)[0], f"no output after {self.output!r}"
        try:
            data = os.read(self._ours, 10_000)
        except OSError:  # Linux: all processes have closed the terminal
            return False
        self.output += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
