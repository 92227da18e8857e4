"""One worker process for each device, started again when it dies or hangs.

A child that cannot start at all (no such model, say) is not tried again: its supervisor ends with its exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from llamaq.worker.process.exit_codes import EXIT_CANNOT_START, EXIT_CRASHED, EXIT_FORCED, EXIT_OK
from llamaq.worker.process.liveness_pipe import LivenessReader
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

POLL_S = 0.1
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
STEADY_S = 60.0
"""A child that lived so long starts with the first backoff again."""


class Child:
    """One place for a worker process, and the process that fills it."""

    def __init__(self, settings: WorkerSettings, log_file: IO[bytes] | None) -> None:
        self.settings = settings
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._pulse: LivenessReader | None = None
        self._started_s = 0.0
        self._again_s = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and hand it its settings; its standard input stays open as the lifeline."""
        ours, theirs = os.pipe()
        self._pulse = LivenessReader(ours)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llamaq.worker.process.supervised_child", str(theirs)],
                stdin=subprocess.PIPE,
                stderr=self._log_file,
                pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C goes to the supervisor, who passes it on in order
            )
        finally:
            os.close(theirs)
        self._started_s = time.monotonic()
        if self._process.stdin is None:
            raise RuntimeError("a child without a standard input")
        self._process.stdin.write(self.settings.model_dump_json().encode() + b"\n")
        self._process.stdin.flush()
        log.info("child.started pid=%d device=%s", self._process.pid, self.settings.device)

    def watch(self) -> int | None:
        """Start it again when it is time, and end it when it hangs.

        Returns the exit code of a child that is not worth another try.
        """
        now = time.monotonic()
        if self._process is None:
            if now >= self._again_s:
                self.start()
            return None
        code = self._process.poll()
        if code is None:
            self._end_if_hung(self._process)
            return None
        self._close()
        if code == EXIT_CANNOT_START:
            return code
        if now - self._started_s > STEADY_S:
            self._backoff_s = FIRST_BACKOFF_S
        log.warning("child.died code=%s lived_s=%.1f again_s=%.1f", code, now - self._started_s, self._backoff_s)
        self._again_s = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        return None

    def _end_if_hung(self, process: subprocess.Popen[bytes]) -> None:
        """Whatever it is stuck in, it answers no other signal; its jobs are another's when their leases are over."""
        if self._pulse is not None and not self._pulse.look():
            log.error("child.hung pid=%d silent_s=%.1f", process.pid, self._pulse.silent_s)
            process.kill()
            self._close_pulse()

    def signal(self, number: int) -> None:
        """Pass a signal on."""
        if self._process is not None and self.is_running:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Wait for its end; kill it after `timeout_s`."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                log.error("child.killed pid=%d", self._process.pid)
                self._process.kill()
                self._process.wait()
            self._close()

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._close_pulse()
        self._process = None

    def _close_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.close()
        self._pulse = None


class Supervisor:
    """Keeps a worker alive for each of the settings it is given."""

    GRACE_S = 20.0
    """For loading to end and jobs to be handed back, beyond the drain."""
    LEAVE_S = 5.0
    """Beyond the drain a child needs a moment to hand its jobs back, before it is told again."""

    def __init__(self, children: Sequence[WorkerSettings], log_file: IO[bytes] | None = None) -> None:
        self._drain_s = max(settings.drain_s for settings in children)
        self.children = [Child(settings, log_file) for settings in children]
        self._signals = 0

    @classmethod
    def of_devices(cls, settings: WorkerSettings) -> Supervisor:
        """One child for each of `--devices`, or one for all devices together."""
        if not settings.devices:
            return cls([settings])
        return cls([settings.model_copy(update={"device": device, "devices": ()}) for device in settings.devices])

    def start(self) -> None:
        """Start all children."""
        for child in self.children:
            child.start()

    def check(self) -> int | None:
        """Look after the children once; returns an exit code when there is no point in going on."""
        codes = [child.watch() for child in self.children]
        return next((code for code in codes if code is not None), None)

    def run(self) -> int:
        """Supervise until SIGTERM or SIGINT; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.start()
        while not self._signals:
            code = self.check()
            if code is not None:
                self.stop()
                return code
            time.sleep(POLL_S)
        ended = self.stop(self._drain_s + self.LEAVE_S)
        if self._signals > 1:
            return EXIT_FORCED
        return EXIT_OK if ended else EXIT_CRASHED

    def stop(self, drain_s: float = 0.0) -> bool:
        """Ask the children to end, insist after `drain_s`, and wait for them; False when one had to be urged."""
        self._signal_all(signal.SIGTERM)
        self._await_children(drain_s)
        in_time = not any(child.is_running for child in self.children)
        if not in_time:
            self._signal_all(signal.SIGTERM)
        for child in self.children:
            child.wait(self.GRACE_S)
        return in_time

    def _await_children(self, timeout_s: float) -> None:
        """Wait until all have ended, the time is over, or a second signal came."""
        deadline = time.monotonic() + timeout_s
        while any(child.is_running for child in self.children) and time.monotonic() < deadline and self._signals < 2:
            time.sleep(POLL_S)

    def _signal_all(self, number: int) -> None:
        for child in self.children:
            child.signal(number)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals += 1
        log.info("supervisor.stopping signal=%s", signal.Signals(number).name)
