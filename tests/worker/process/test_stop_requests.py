"""The signals that stop a worker."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from array import array
from select import select

import pytest

from llamaq.worker.process.stop_requests import StopRequests

N_PIPE_BYTES = 4096
LOGGING_WORKER = """
import logging, os, signal
from llamaq.common.logging_setup import configure_logging
from llamaq.worker.process.stop_requests import StopRequests, handle_stop_signals

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
configure_logging("info")
stop = lambda grace_s: os.write(1, b"stopped")
handle_stop_signals(StopRequests(stop, lambda: 0, drain_s=30, is_supervised=False).receive)
while True:
    logging.getLogger("llamaq").info("job.admitted id=%s", "x" * 50)
"""


def n_unread(pipe: int) -> int:
    size = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, size)
    return size[0]


@pytest.mark.starts_processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_within_the_write_of_a_log_line_stops_the_worker(number: signal.Signals) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, N_PIPE_BYTES)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", LOGGING_WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, env=env) as child:
        os.close(writer)
        deadline_s = time.monotonic() + 30
        try:
            while n_unread(reader) < N_PIPE_BYTES - 200:  # then the worker waits within the write of a line
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            child.send_signal(number)
            assert child.stdout is not None
            is_told, _, _ = select([child.stdout], [], [], 30)
            assert is_told, "the signal was lost"
        finally:
            child.kill()
            os.close(reader)


@pytest.mark.parametrize(
    ("is_supervised", "numbers", "grace_s"),
    [
        (False, [signal.SIGTERM, signal.SIGINT], [30, 0]),
        (False, [signal.SIGINT], [30]),
        (True, [signal.SIGTERM, signal.SIGTERM, signal.SIGINT], [30, 30, 0]),
    ],
)
def test_the_second_signal_stops_at_once_and_a_supervisor_decides_with_sigint(
    is_supervised: bool, numbers: list[int], grace_s: list[float]
) -> None:
    stopped: list[float] = []
    requests = StopRequests(stopped.append, lambda: 1, drain_s=30, is_supervised=is_supervised)
    for number in numbers:
        requests.receive(number, None)
    assert stopped == grace_s
    assert requests.is_forced == (grace_s[-1] == 0)
