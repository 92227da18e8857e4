"""The entry point of a worker that a supervisor started.

Its settings come as one line of JSON on standard input, where no process list shows the password of a Redis URL.
Standard input then stays open as a lifeline: at its end the supervisor is gone, however that happened, and so is
this process. The one argument, if there is one, is the file descriptor of a pipe for beats.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial

from llamaq.worker.process.exit_codes import EXIT_CRASHED
from llamaq.worker.process.liveness_pipe import LivenessWriter
from llamaq.worker.process.logging_setup import configure_logging
from llamaq.worker.process.worker_process import serve
from llamaq.worker.settings import WorkerSettings

LAST_WORDS_S = 15.0
"""For handing jobs back after the supervisor is gone."""
URGE_EVERY_S = 0.2
"""Signals that come at once count as one."""


def _hold_lifeline() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin: a thread inside it aborts the interpreter's exit
        pass
    until_s = time.monotonic() + LAST_WORDS_S
    while time.monotonic() < until_s:  # more than once: nobody is left to wait for a drain, and the second one forces
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(URGE_EVERY_S)
    os._exit(EXIT_CRASHED)


def main(beats_fd: int | None = None) -> int:
    """Run the worker whose settings come in; returns its exit code."""
    line = sys.stdin.buffer.readline()
    settings = WorkerSettings.model_validate_json(line)
    configure_logging(settings.log_level)
    threading.Thread(target=_hold_lifeline, name="llamaq-lifeline", daemon=True).start()
    return serve(settings) if beats_fd is None else serve(settings, partial(LivenessWriter, beats_fd))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
