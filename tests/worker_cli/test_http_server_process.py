"""The HTTP server of `llamaq up`, a real process."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from llamaq.gateway.settings import ServeSettings
from llamaq.worker.process import restart_delay
from llamaq.worker_cli.http_server_process import HttpServerProcess


@pytest.fixture
def server() -> Iterator[HttpServerProcess]:
    with HttpServerProcess(ServeSettings(http_port=0, redis_url="redis://127.0.0.1:1/0"), is_wanted=True) as server:
        yield server


def wait_until_served(server: HttpServerProcess) -> None:
    """Restart the server when it is time, and wait until it answers. It has no Redis."""
    url = server.state.split()[0]
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        server.check()
        with suppress(httpx.TransportError):  # the socket accepts connections, but no process answers yet
            httpx.get(f"{url}/openapi.json", timeout=0.5).raise_for_status()
            return
    pytest.fail("the server does not answer")


def kill(server: HttpServerProcess) -> None:
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    server.check()


@pytest.mark.starts_processes
def test_a_server_that_is_killed_starts_again_after_a_delay_that_is_short_after_a_long_life(
    server: HttpServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for steady_s in (60.0, 60.0, 0.0):
        monkeypatch.setattr(restart_delay, "STEADY_S", steady_s)
        wait_until_served(server)
        kill(server)
    wait_until_served(server)
    assert re.findall(r"http\.died code=-9 restart_in_s=(\S+)", caplog.text) == ["0.1", "0.2", "0.1"]


@pytest.mark.starts_processes
def test_a_server_that_cannot_be_started_again_now_is_started_later(
    server: HttpServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until_served(server)
    kill(server)
    refused = iter([BlockingIOError(11, "Resource temporarily unavailable")])
    start = subprocess.Popen.__init__

    def refuse_once(*args: Any, **kwargs: Any) -> None:
        for error in refused:
            raise error
        start(*args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse_once)
    wait_until_served(server)
    assert "http.not_started error=[Errno 11]" in caplog.text


@pytest.mark.starts_processes
def test_a_server_whose_parent_ends_before_it_has_sent_the_settings_ends_without_an_error() -> None:
    command = [sys.executable, "-m", "llamaq.gateway.child_main", "0"]
    ended = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
