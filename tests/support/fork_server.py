"""The process that `forked_scripts.py` starts: imports llamaq's modules once, and forks itself for each script.

Standard input is a socket. A request is the length of a JSON text (four bytes, big-endian), that text, which is a
`NewProcess`, and file descriptors: a socket for the replies, and the files of the script. The replies are the process
id and, when the process has ended, its wait status. The server ends when standard input is closed.

The children that a script starts with `python -m MODULE` are forked too: `forked_children.py`.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket

from tests.support.forked_children import NewProcess, become, receive


def import_commands() -> None:
    """Import what the scripts and their children import."""
    from llamaq.cli import main  # noqa: F401
    from llamaq.gateway import app, uvicorn_server  # noqa: F401
    from llamaq.gateway_cli import server_commands  # noqa: F401
    from llamaq.worker.generation.grammar import gbnf_to_lark, token_constraint  # noqa: F401
    from llamaq.worker.process import worker_process  # noqa: F401
    from llamaq.worker_cli import start_worker_commands  # noqa: F401


def serve(control: socket.socket) -> NewProcess | None:
    """Serve requests. Returns the script in each new process, and None in the server when `control` is closed."""
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
        if (request := receive(control)) is None:
            return None
        script, (replies, *files) = request
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGHUP):  # `nohup make test` ignores SIGHUP
                signal.signal(number, signal.SIG_DFL)
            for one in (control, woken, wake, *running.values()):
                one.close()
            os.close(replies)
            return become(script, files)
        for file in files:
            os.close(file)
        running[pid] = socket.socket(fileno=replies)
        running[pid].sendall(pid.to_bytes(4, "big"))


def report_ended(running: dict[int, socket.socket]) -> None:
    """Send the wait status of each process that has ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as replies:
            replies.sendall(status.to_bytes(4, "big"))


if __name__ == "__main__":
    import_commands()
    # Otherwise each new process would copy the memory of all these objects when its garbage collector visits them.
    gc.freeze()
    control = socket.socket(fileno=os.dup(0))
    if script := serve(control):
        script.run()
