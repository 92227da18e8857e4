"""The signals that stop a worker or its supervisor."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

log = logging.getLogger(__name__)


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call `handler` at SIGTERM, SIGINT, and SIGHUP (the terminal was closed), which `nohup` lets a process ignore."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


class StopRequests:
    """Drains a worker at the first signal. Stops it at once at the second signal, or with a supervisor at its SIGINT.

    systemd sends SIGTERM to all processes of a service. The supervisor then sends its own SIGTERM, so a worker with
    a supervisor may get SIGTERM twice, although the drain has just begun.

    Args:
        stop: Called at each signal, with the time in seconds for which the running jobs may continue.
        count_running: Returns the number of running jobs.
        drain_s: How long the running jobs may continue after the first signal, in seconds.
        is_supervised: Whether the worker has a supervisor.
    """

    def __init__(
        self, stop: Callable[[float], None], count_running: Callable[[], int], *, drain_s: float, is_supervised: bool
    ) -> None:
        self._stop = stop
        self._count_running = count_running
        self._drain_s = drain_s
        self._is_supervised = is_supervised
        self._n_signals = 0
        self.is_forced = False
        """Whether the worker stops at once."""

    def receive(self, number: int, _: FrameType | None) -> None:
        """Stop the worker. This is the handler of the signals."""
        self._n_signals += 1
        self.is_forced |= number == signal.SIGINT if self._is_supervised else self._n_signals > 1
        self._stop(0 if self.is_forced else self._drain_s)
        with suppress(RuntimeError):  # the signal interrupts the write of another line: the log cannot take this one
            self._log(number)

    def _log(self, number: int) -> None:
        log.info("worker.stopping signal=%s", signal.Signals(number).name)
        if self._n_signals == 1 and (n_running := self._count_running()):
            log.info(
                "worker.draining running=%d: these jobs may finish within %g s (--drain-s); a second signal requeues "
                "them at once",
                n_running,
                self._drain_s,
            )

    def __repr__(self) -> str:
        return f"<StopRequests {self._n_signals} signals>"
