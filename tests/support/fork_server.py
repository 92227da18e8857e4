"""The process that `forked_scripts.py` starts: imports llamaq's commands once, and forks itself for each script.

Standard input is a socket. A request is the length of a JSON text (four bytes, big-endian), that text, and three file
descriptors: a socket for the replies, the script's standard input, and the file for its output. The replies are the
process id and, when the process has ended, its wait status. The server ends when standard input is closed.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any


def import_commands() -> None:
    """Import what the scripts import."""
    from llamaq.cli import main, start_worker_commands  # noqa: F401
    from llamaq.gateway import app, uvicorn_server  # noqa: F401
    from llamaq.worker.process import worker_process  # noqa: F401


def serve(control: socket.socket) -> bool:
    """Serve requests. Returns True in each new process, and False in the server when `control` is closed."""
    running: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            report_ended(running)
        if control not in ready:
            continue
        header, files, _, _ = socket.recv_fds(control, 4, 3)
        if not header:
            return False
        request = json.loads(receive(control, int.from_bytes(header, "big")))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for one in (woken, wake, *running.values()):
                one.close()
            become(request, *files)
            return True
        for file in files[1:]:
            os.close(file)
        running[pid] = socket.socket(fileno=files[0])
        running[pid].sendall(pid.to_bytes(4, "big"))


def receive(control: socket.socket, n_bytes: int) -> bytes:
    """Receive exactly this number of bytes."""
    data = b""
    while len(data) < n_bytes:
        data += control.recv(n_bytes - len(data))
    return data


def report_ended(running: dict[int, socket.socket]) -> None:
    """Send the wait status of each process that has ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as replies:
            replies.sendall(status.to_bytes(4, "big"))


def become(request: dict[str, Any], replies: int, stdin: int, output: int) -> None:
    """Make this new process look like one that was just started for a script."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(request["cwd"])
    for source, target in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for file in (replies, stdin, output):
        os.close(file)
    os.environ.clear()
    os.environ.update(request["variables"])
    tempfile.tempdir = None  # depends on the variables
    sys.argv = request["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


if __name__ == "__main__":
    import_commands()
    control = socket.socket(fileno=os.dup(0))
    is_new_process = serve(control)
    control.close()
    if is_new_process:
        runpy.run_path(sys.argv[0], run_name="__main__")
