"""A worker process under a supervisor: starts it, notices that it dies or hangs, and starts it again."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from llamaq.worker.process.exit_codes import EXIT_CANNOT_START, EXIT_FORCED, EXIT_OK
from llamaq.worker.process.liveness_pipe import LivenessReader
from llamaq.worker.process.process_identity import make_worker_id
from llamaq.worker.process.requeue_jobs_of_dead_worker import release_in_background
from llamaq.worker.process.restart_delay import RestartDelay
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

JOBLESS_CODES = (EXIT_OK, EXIT_FORCED, EXIT_CANNOT_START, -signal.SIGTERM)
"""Exit codes of a child that has no jobs: it has requeued them, could not start, or was still loading its model when
SIGTERM ended it."""
LONGEST_DELAY_S = 30.0
"""Upper bound on the delay of a restart."""


class SupervisedChild:
    """A worker process. When it dies, a new process with the same settings replaces it."""

    def __init__(self, settings: WorkerSettings, log_file: IO[bytes] | None) -> None:
        """Create the child. `start` starts its process.

        Args:
            settings: The settings of the worker.
            log_file: Receives the standard error of the worker. None: the standard error of this process.
        """
        self.settings = settings
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._liveness: LivenessReader | None = None
        self._worker_id = ""
        self._releasing: threading.Thread | None = None
        """The thread that releases the jobs of the last process that died."""
        self._started_s = 0.0
        self._restart_delay = RestartDelay(LONGEST_DELAY_S)
        self._has_crashed = False
        """Whether a process of this child has died."""
        self.is_done = False
        """Whether the worker has ended because its queue is empty (`exit_when_empty`). It is not restarted."""
        self.has_died_at_end = False
        """Whether the process died after it was told to stop, and did not requeue its jobs."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and write its settings to its standard input, which stays open as long as this process
        lives.
        """
        read_fd, write_fd = os.pipe()
        self._liveness = LivenessReader(read_fd)
        token = secrets.token_hex(3)
        self.has_died_at_end = False
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llamaq.worker.process.child_main", str(write_fd), token],
                stdin=subprocess.PIPE,
                stderr=self._log_file,
                pass_fds=(write_fd,),
                start_new_session=True,  # Ctrl-C must reach only the supervisor, which then stops its children
                env=_environment(),
            )
        finally:
            os.close(write_fd)
        self._worker_id = make_worker_id(self._process.pid, token)
        self._started_s = time.monotonic()
        if self._process.stdin is None:
            raise RuntimeError("a child without a standard input")
        with suppress(BrokenPipeError):  # the process has died already: the next `check` restarts it after its delay
            self._process.stdin.write(self.settings.model_dump_json(exclude_unset=True).encode() + b"\n")
            self._process.stdin.flush()
        log.info("child.started pid=%d device=%s", self._process.pid, self.settings.device)

    def check(self) -> int | None:
        """Kill a process that hangs, release the jobs of a dead process, and restart it after its restart delay.

        Returns:
            The exit code of a process that cannot start. None otherwise, and after a crash: the process could start
            before, so the reason may pass. Example: another program is replacing the model file.
        """
        if self.is_done:
            return None
        if self._process is None:
            if self._restart_delay.is_over:
                self._restart()
            return None
        code = self._process.poll()
        if code is None:
            self._kill_if_hung(self._process)
            return None
        self._close()
        if code == EXIT_CANNOT_START and not self._has_crashed:
            return code
        if code == EXIT_OK and self.settings.exit_when_empty:
            self.is_done = True
            return None
        self._has_crashed = True
        self._releasing = release_in_background(self.settings, self._worker_id)
        lived_s = time.monotonic() - self._started_s
        delay_s = self._restart_delay.begin(lived_s)
        log.warning("child.died code=%s lived_s=%.1f restart_in_s=%.1f", code, lived_s, delay_s)
        return None

    def _restart(self) -> None:
        """Start the process again. Try later if the machine has no memory or file descriptors for it at the moment."""
        try:
            self.start()
        except OSError as exc:
            self._close_liveness()
            log.error("child.not_started error=%s restart_in_s=%.1f", exc, self._restart_delay.begin())

    def _kill_if_hung(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process whose engine hangs: it cannot handle other signals. Its jobs are released."""
        if self._liveness is not None and not self._liveness.poll():
            log.error("child.hung pid=%d silent_s=%.1f", process.pid, self._liveness.silent_s)
            process.kill()
            self._close_liveness()

    def signal(self, number: int) -> None:
        """Send a signal to the process, if the process runs."""
        if self._process is not None and self.is_running:
            self._process.send_signal(number)

    def check_end(self) -> None:
        """If the process, which was told to stop, has died instead, release its jobs. It is not restarted."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return
        self._close()
        if code not in JOBLESS_CODES:
            log.error("child.died code=%s: it was told to stop, and did not requeue its jobs", code)
            self.has_died_at_end = True
            self._releasing = release_in_background(self.settings, self._worker_id)

    def kill(self) -> None:
        """Kill the process if it still runs, although it was told to stop."""
        if self._process is not None and self.is_running:
            log.error("child.killed pid=%d", self._process.pid)
            self._process.kill()

    def await_release(self, until_s: float) -> None:
        """Wait until the jobs of a process that died are released, at most until this time of `time.monotonic`."""
        if self._releasing is not None:
            self._releasing.join(max(0.0, until_s - time.monotonic()))

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # the process died before it read its settings, which this call writes again
                self._process.stdin.close()
        self._close_liveness()
        self._process = None

    def _close_liveness(self) -> None:
        if self._liveness is not None:
            self._liveness.close()
        self._liveness = None

    def __repr__(self) -> str:
        return f"<SupervisedChild pid={self.pid} device={self.settings.device}>"


def _environment() -> dict[str, str]:
    """Return the environment of a child, which OpenTelemetry configures as it has configured this process.

    `opentelemetry-instrument` puts the folder of its `sitecustomize` into PYTHONPATH. Before version 0.66, the first
    process removes it.
    """
    automatic = sys.modules.get("opentelemetry.instrumentation.auto_instrumentation")
    if automatic is None or automatic.__file__ is None:
        return dict(os.environ)
    paths = [str(Path(automatic.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
