"""The HTTP server that `llamaq up` starts beside its workers, as a process of its own."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import time
from socket import socket
from types import TracebackType
from typing import Self

from llamaq.gateway.settings import ServeSettings
from llamaq.worker.process.restart_delay import RestartDelay
from llamaq.worker.process.stop_process import stop_process

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
LONGEST_DELAY_S = 30.0
SHUTDOWN_S = 1.0
"""Seconds that open requests have to finish when `up` ends: no worker answers them any more."""


class HttpServerProcess:
    """Runs the HTTP server in a process, and restarts it when it dies. The context manager ends it.

    The socket belongs to this process, so that connections wait during a restart and are not refused.
    """

    def __init__(self, settings: ServeSettings, *, is_wanted: bool) -> None:
        """Prepare the server; the context manager starts it if it `is_wanted`."""
        self._is_wanted = is_wanted
        self._settings = settings.model_copy(update={"shutdown_s": SHUTDOWN_S})
        self._socket: socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._delay = RestartDelay(LONGEST_DELAY_S)
        self._is_delayed = False
        self.state = "not started"
        """The URLs of the server, or why it does not run."""

    def __repr__(self) -> str:
        return f"<HttpServerProcess {self.state}>"

    def __enter__(self) -> Self:
        if not self._is_wanted:
            return self
        if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
            self.state = "not started: pip install 'llamaq[serve]'"
            return self
        from llamaq.gateway.uvicorn_server import bind, url_of

        try:
            self._socket = bind(self._settings)
        except OSError as exc:
            self.state = f"not started: {exc.strerror} (--http-host, --http-port)"
            return self
        url = url_of(self._settings, self._socket)
        self.state = f"{url} (a chat page; clients of OpenAI's API: {url}/v1)"
        self._start(self._socket)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            stop_process(self._process, STOP_TIMEOUT_S)
            self._close_lifeline(self._process)
        if self._socket is not None:
            self._socket.close()

    def check(self) -> None:
        """Restart the server if it has died, after a delay that grows if it dies again and again."""
        if self._process is None or self._socket is None or self._process.poll() is None:
            return
        if not self._is_delayed:
            self._is_delayed = True
            delay_s = self._delay.begin(time.monotonic() - self._started_s)
            log.warning("http.died code=%s restart_in_s=%.1f", self._process.returncode, delay_s)
        elif self._delay.is_over:
            self._close_lifeline(self._process)
            self._restart(self._socket)

    def _restart(self, listening: socket) -> None:
        """Start the server again. Try later if the machine has no memory or file descriptors for it at the moment."""
        try:
            self._start(listening)
        except OSError as exc:
            self._is_delayed = True
            log.error("http.not_started error=%s restart_in_s=%.1f", exc, self._delay.begin())

    def _start(self, listening: socket) -> None:
        self._started_s, self._is_delayed = time.monotonic(), False
        fd = listening.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llamaq.gateway.child_main", str(fd)],
            stdin=subprocess.PIPE,
            pass_fds=(fd,),
            start_new_session=True,  # Ctrl-C must reach only `up`, whose workers finish their jobs first
        )
        if self._process.stdin is None:
            raise RuntimeError("a child without a standard input")
        self._process.stdin.write(self._settings.model_dump_json().encode() + b"\n")
        self._process.stdin.flush()

    @staticmethod
    def _close_lifeline(process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()
