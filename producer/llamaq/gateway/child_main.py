"""The entry point of the child process in which `llamaq up` runs the HTTP server.

The parent writes the settings as one line of JSON to the standard input of this process, because the password of a
Redis URL must not appear in a process list. The standard input then stays open. When it is closed, the parent is dead,
and this process ends too. The argument is the file descriptor of the listening socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

from llamaq.common.logging_setup import configure_logging
from llamaq.gateway.settings import ServeSettings
from llamaq.gateway.uvicorn_server import build_server


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # a thread that waits in sys.stdin makes Python abort at exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(listening_fd: int) -> None:
    """Serve at a socket until SIGTERM."""
    line = sys.stdin.buffer.readline()
    if not line:
        return  # a signal has ended the parent before it wrote the settings
    settings = ServeSettings.model_validate_json(line)
    configure_logging(settings.log_level, settings.log_format)
    threading.Thread(target=_end_with_parent, name="llamaq-lifeline", daemon=True).start()
    with socket.socket(fileno=listening_fd) as listening:
        build_server(settings).run([listening])


if __name__ == "__main__":
    main(int(sys.argv[1]))
