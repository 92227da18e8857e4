"""The supervisor: runs one worker process for each device, and restarts a worker that dies or hangs.

A child that can never start, for example because its model does not exist, is not restarted. The supervisor then ends
with the exit code of that child. A child that crashed and then cannot start is tried again and again, while the other
children run.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import IO

from llamaq.common.errors import LlamaqError
from llamaq.worker.process.exit_codes import EXIT_CRASHED, EXIT_FORCED, EXIT_OK
from llamaq.worker.process.requeue_jobs_of_dead_worker import RELEASE_TIMEOUT_S
from llamaq.worker.process.stop_requests import handle_stop_signals
from llamaq.worker.process.stop_times import LEAVE_TIMEOUT_S, SAVE_TIMEOUT_S
from llamaq.worker.process.supervised_child import SupervisedChild
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

POLL_S = 0.1


class Supervisor:
    """Runs a worker process for each of the given settings, and restarts processes that die or hang."""

    REQUEUE_S = LEAVE_TIMEOUT_S + SAVE_TIMEOUT_S
    """How long the children may take to requeue their jobs and to save their prefix caches after the drain, before the
    second signal."""
    KILL_AFTER_S = 20.0
    """How long the children may take to end after the second signal. Then all of them are killed."""
    AFTER_DRAIN_S = REQUEUE_S + KILL_AFTER_S + RELEASE_TIMEOUT_S
    """How long `run` takes at most after the drain: it also waits until the jobs of killed children are released."""

    def __init__(
        self,
        children: Sequence[WorkerSettings],
        log_file: IO[bytes] | None = None,
        *,
        also_check: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the supervisor; `run` or `start` starts the children.

        Args:
            children: The settings of each child.
            log_file: Receives the standard error of all children; None: the standard error of this process.
            also_check: Called with each check of the children, even while they drain. It restarts processes that the
                children need, such as an embedded Redis. It raises a `LlamaqError` when it cannot restart them.
        """
        self._also_check = also_check
        self._drain_s = max(settings.drain_s for settings in children)
        self.children = [SupervisedChild(settings, log_file) for settings in children]
        self._n_signals = 0

    @classmethod
    def of_devices(cls, settings: WorkerSettings, *, also_check: Callable[[], None] = lambda: None) -> Supervisor:
        """Return a supervisor with one child for each of `--devices`, or with one child that uses all devices."""
        first = settings.metrics_port
        children = [
            settings.model_copy(
                update={"device": device, "devices": (), "metrics_port": first + number if first else first}
            )
            for number, device in enumerate(settings.devices)
        ]
        return cls(children or [settings], also_check=also_check)

    def start(self) -> None:
        """Start all children."""
        for child in self.children:
            child.start()

    def check(self) -> int | None:
        """Check every child once. Returns the exit code of a child that cannot start, or None.

        Raises:
            LlamaqError: Something that the children need has ended and cannot be restarted.
        """
        self._also_check()
        codes = [child.check() for child in self.children]
        return next((code for code in codes if code is not None), None)

    def run(self) -> int:
        """Supervise until SIGTERM, SIGINT or SIGHUP, or until all children are done; returns the exit code.

        Raises:
            LlamaqError: Something that the children need has ended and cannot be restarted. The children are stopped.
        """
        handle_stop_signals(self._on_signal)
        self.start()
        while not self._n_signals and not all(child.is_done for child in self.children):
            try:
                code = self.check()
            except BaseException:
                self.stop()
                raise
            if code is not None:
                self.stop()
                return code
            time.sleep(POLL_S)
        has_drained = self.stop(self._drain_s + self.REQUEUE_S)
        if self._n_signals > 1:
            return EXIT_FORCED
        return EXIT_OK if has_drained else EXIT_CRASHED

    def stop(self, drain_s: float = 0.0) -> bool:
        """Stop all children: send SIGTERM, SIGINT after `drain_s`, and SIGKILL another `KILL_AFTER_S` later.

        This takes at most `drain_s` + `KILL_AFTER_S` + `RELEASE_TIMEOUT_S`, also with several children.

        Returns:
            True when all children ended after the first SIGTERM, and none of them died. The jobs of a child that died
            are released.
        """
        self._signal_all(signal.SIGTERM)
        self._await_drains(drain_s)
        ended_in_time = not any(child.is_running for child in self.children)
        if not ended_in_time:
            self._signal_all(signal.SIGINT)
            self._await_ends(time.monotonic() + self.KILL_AFTER_S)
            for child in self.children:
                child.kill()
        released_s = time.monotonic() + RELEASE_TIMEOUT_S
        self._await_ends(released_s)  # also after SIGKILL: a driver that hangs may delay the end of a process
        for child in self.children:
            child.await_release(released_s)
        return ended_in_time and not any(child.has_died_at_end for child in self.children)

    def _await_drains(self, timeout_s: float) -> None:
        """Wait until all children have ended, `timeout_s` is over, or a second signal has come."""
        deadline_s = time.monotonic() + timeout_s
        while self._has_running() and time.monotonic() < deadline_s:
            if self._n_signals > 1:
                return
            try:
                self._also_check()
            except LlamaqError as exc:
                log.error("supervisor.drain_ended reason=%s", exc)
                return
            time.sleep(POLL_S)

    def _await_ends(self, until_s: float) -> None:
        """Wait until all children have ended, at most until this time of `time.monotonic`."""
        while self._has_running() and time.monotonic() < until_s:
            time.sleep(POLL_S)

    def _has_running(self) -> bool:
        """Return whether a child has not ended. The release of the jobs of a child that has died begins at once."""
        has_running = any(child.is_running for child in self.children)
        for child in self.children:
            child.check_end()
        return has_running

    def _signal_all(self, number: int) -> None:
        for child in self.children:
            child.signal(number)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._n_signals += 1
        with suppress(RuntimeError):  # the signal interrupts the write of another line
            log.info("supervisor.stopping signal=%s", signal.Signals(number).name)

    def __repr__(self) -> str:
        return f"<Supervisor {self.children!r}>"
