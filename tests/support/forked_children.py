"""Processes that are forked instead of started as new interpreters, and whose Python children are forked too.

A process that `fork_server.py` has forked starts a child with `subprocess.Popen([sys.executable, "-m", MODULE, ...])`.
If MODULE is one of `FORKED_MODULES`, the child is forked from a process that has imported its modules: the fork helper,
which belongs to one process of a test, and ends with it. It was forked before the script of that process began, so the
child gets nothing of the script's state. The child is a true child: `wait`, signals and the reparenting of orphans work
as always, and its command line is that of a new interpreter.
"""

from __future__ import annotations

import ctypes
import fcntl
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

FORKED_MODULES = frozenset(
    {
        "llamaq.gateway.child_main",
        "llamaq.worker.generation.grammar.sandbox_process",
        "llamaq.worker.process.child_main",
    }
)
FIRST_OWN_FD = 200
"""The file descriptors of this module have this number or a higher one, which no test passes to a child."""
MAX_FILES = 8
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Signals to a process group must not end a fork helper before its process."""
PR_SET_CHILD_SUBREAPER = 36
HELPER_COMMAND = "fork-helper"
"""The command line of each fork helper."""
LIBRARY_PATHS = sys.path[1:]
"""The folders of imports, without the folder of the script and those of PYTHONPATH."""
for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    if folder in LIBRARY_PATHS:
        LIBRARY_PATHS.remove(folder)


@dataclass(frozen=True)
class NewProcess:
    """What a forked process runs, and how."""

    command: Sequence[str]
    """The command line of a new interpreter that would run the same."""
    cwd: str
    variables: Mapping[str, str]
    """All environment variables."""
    files: Sequence[Sequence[int]]
    """The numbers that each file descriptor sent with the request gets in the process."""
    has_own_session: bool = True
    has_terminal: bool = False
    """Whether its standard input is the terminal that controls its session."""

    @property
    def module(self) -> str | None:
        """The module after `-m`. None: the command runs a script."""
        return self.command[self.command.index("-m") + 1] if "-m" in self.command[1:3] else None

    def run(self) -> None:
        """Run the module or the script in this process."""
        if self.module is None:
            sys.argv = list(self.command[1:])
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            sys.argv = list(self.command[self.command.index("-m") + 1 :])
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)


def send(control: socket.socket, process: NewProcess, files: Sequence[int]) -> None:
    """Send a request with file descriptors."""
    request = json.dumps(asdict(process)).encode()
    socket.send_fds(control, [len(request).to_bytes(4, "big")], files)
    control.sendall(request)


def receive(control: socket.socket) -> tuple[NewProcess, list[int]] | None:
    """Receive a request with its file descriptors. None: the other side is closed."""
    header, files, _, _ = socket.recv_fds(control, 4, MAX_FILES)
    if not header:
        return None
    return NewProcess(**json.loads(receive_exactly(control, int.from_bytes(header, "big")))), files


def receive_exactly(control: socket.socket, n_bytes: int) -> bytes:
    """Receive this number of bytes.

    Raises:
        EOFError: The other side is closed.
    """
    data = b""
    while len(data) < n_bytes:
        more = control.recv(n_bytes - len(data))
        if not more:
            raise EOFError("the process that forks has ended")
        data += more
    return data


def become(process: NewProcess, files: Sequence[int]) -> NewProcess:
    """Make this new process look like a new interpreter, and return what it shall run.

    Returns again in each child that is forked for this process later: with what the child shall run.
    """
    while True:  # another round begins in each child
        if process.has_own_session:
            os.setsid()
        own, of_helper = socket.socketpair()
        if os.fork() == 0:
            own.close()
            process, files = _fork_for_requests(of_helper, files)
            continue
        of_helper.close()
        control = socket.socket(fileno=fcntl.fcntl(own.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_FD))
        own.close()
        _take_over(process, files)
        _fork_children_with(control)
        return process


def _fork_for_requests(control: socket.socket, unused: Sequence[int]) -> tuple[NewProcess, Sequence[int]]:
    """Be the fork helper of the parent process. Returns in each new process; the helper itself ends here."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    for file in (null, *unused):
        os.close(file)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _show_command([HELPER_COMMAND])
    while (request := receive(control)) is not None:
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                control.close()
                for number in IGNORED_SIGNALS:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
                return request
            control.sendall(pid.to_bytes(4, "big"))
            os._exit(0)
        os.waitpid(between, 0)  # now the process that requested it is the parent of the new one
        for file in request[1]:
            os.close(file)
        control.sendall(b"\0")
    os._exit(0)


def _take_over(process: NewProcess, files: Sequence[int]) -> None:
    """Give this process the folder, files, variables and command line that a new interpreter would have."""
    os.chdir(process.cwd)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_FD) for file in files]
    for file in files:
        os.close(file)
    for source, numbers in zip(moved, process.files, strict=True):
        for number in numbers:
            os.dup2(source, number)
        os.close(source)
    if process.has_terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdout, sys.stderr = _output_stream(1, errors="strict"), _output_stream(2, errors="backslashreplace")
    os.environ.clear()
    os.environ.update(process.variables)
    tempfile.tempdir = None  # depends on the variables
    paths = filter(None, process.variables.get("PYTHONPATH", "").split(os.pathsep))
    first = str(Path(process.command[1]).parent) if process.module is None else process.cwd
    sys.path[:] = [*([] if "-P" in process.command[1:2] else [first]), *paths, *LIBRARY_PATHS]
    _show_command(process.command)


def _output_stream(number: int, *, errors: str) -> TextIO:
    """Return a stream as a new interpreter opens it. Those of the parent know whether other files are seekable."""
    is_line_buffered = number == 2 or os.isatty(number)
    return open(number, "w", buffering=1 if is_line_buffered else -1, errors=errors, closefd=False)


def _show_command(command: Sequence[str]) -> None:
    """Let /proc/PID/cmdline and `ps` show this command: write it over the arguments of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = "\0".join(command).encode()[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _fork_children_with(control: socket.socket) -> None:
    """Let `subprocess.Popen` of this process fork children, as far as they run `FORKED_MODULES`."""
    start_interpreter: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    parameters = inspect.signature(start_interpreter)
    library, lock, owner = ctypes.CDLL(None), threading.Lock(), os.getpid()

    def execute_child(popen: Any, *arguments: Any) -> None:
        given = parameters.bind(popen, *arguments).arguments
        process = _as_new_process(given)
        if process is None or os.getpid() != owner:
            start_interpreter(popen, *arguments)
            return
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [number if end == -1 else end for number, end in enumerate(ends)]
        with lock:
            library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the parent of an orphan is the nearest subreaper
            send(control, process, [*files, *given["pass_fds"]])
            popen.pid = int.from_bytes(receive_exactly(control, 4), "big")
            receive_exactly(control, 1)
            library.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        popen._child_created = True
        popen._close_pipe_fds(
            *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _as_new_process(given: Mapping[str, Any]) -> NewProcess | None:
    """Return the process that these arguments of `Popen._execute_child` describe. None: it cannot be forked."""
    command, files = given["args"], given["pass_fds"]
    if isinstance(command, str | bytes | os.PathLike) or command[0] != sys.executable:
        return None
    options = [each for each in command[1:3] if each != "-P"]
    if options[:1] != ["-m"] or given["preexec_fn"] or len(files) > MAX_FILES - 3:
        return None
    process = NewProcess(
        [os.fspath(each) for each in command],
        os.fspath(given["cwd"] or Path.cwd()),
        dict(os.environ if given["env"] is None else given["env"]),
        [*((number,) for number in range(3)), *((number,) for number in files)],
        has_own_session=given["start_new_session"],
    )
    is_forked = process.module in FORKED_MODULES and max(files, default=0) < FIRST_OWN_FD
    return process if is_forked else None
