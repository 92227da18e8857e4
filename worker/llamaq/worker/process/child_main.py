"""The entry point of a worker process that a supervisor starts.

The supervisor writes the settings as one line of JSON to the standard input of this process, because the password of a
Redis URL must not appear in a process list. The standard input then stays open. When it is closed, the supervisor is
dead, and this process ends too. The optional arguments are the file descriptor of the liveness pipe and a part of the
worker's id.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial

from llamaq.common.errors import EngineError
from llamaq.common.logging_setup import configure_logging
from llamaq.worker.engine.library_check import check_library
from llamaq.worker.process.exit_codes import EXIT_CANNOT_START, EXIT_CRASHED
from llamaq.worker.process.liveness_pipe import LivenessWriter
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

ORPHAN_TIMEOUT_S = 15.0
"""How long a worker without a supervisor may take to requeue its jobs."""
SIGNAL_EVERY_S = 0.2
"""Seconds between two signals, so that the first one is handled before the next one arrives."""


def _end_with_supervisor() -> None:
    """Wait for the death of the supervisor, then stop this process."""
    while os.read(sys.stdin.fileno(), 4096):  # a thread that waits in sys.stdin makes Python abort at exit
        pass
    deadline_s = time.monotonic() + ORPHAN_TIMEOUT_S
    os.kill(os.getpid(), signal.SIGTERM)  # ends a process that still loads its model
    while time.monotonic() < deadline_s:
        time.sleep(SIGNAL_EVERY_S)
        os.kill(os.getpid(), signal.SIGINT)  # skips the drain
    os._exit(EXIT_CRASHED)


def main(liveness_fd: int | None = None, token: str | None = None) -> int:
    """Run the worker with the settings on standard input; returns its exit code.

    Args:
        liveness_fd: The write end of the liveness pipe. None: there is no pipe.
        token: Part of the worker's id, so that the supervisor knows the id. None: a random token.
    """
    line = sys.stdin.buffer.readline()
    settings = WorkerSettings.model_validate_json(line)
    configure_logging(settings.log_level, settings.log_format)
    threading.Thread(target=_end_with_supervisor, name="llamaq-lifeline", daemon=True).start()
    return check_and_serve(settings, liveness_fd, token)


def check_and_serve(settings: WorkerSettings, liveness_fd: int | None = None, token: str | None = None) -> int:
    """Load llama.cpp, run the worker in this process, and return its exit code; see `main`."""
    try:
        check_library()
    except EngineError as exc:
        log.error("worker.cannot_start error=%s", exc)
        return EXIT_CANNOT_START
    from llamaq.worker.process.worker_process import Watch, serve  # the library is loaded now

    watch: Watch = nullcontext if liveness_fd is None else partial(LivenessWriter, liveness_fd)
    return serve(settings, watch, token)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main())
