"""Workers that compute at the same time on one host share its CPU cores, and leave busy cores to other programs.

In each step, the threads of llama.cpp wait actively for each other many times. When all workers together have more
threads than cores, a waiting thread keeps the thread that it waits for off its core. Two workers with two threads each
on two cores then generate a tenth of the tokens that they generate with one thread each. The same happens beside other
programs that keep cores busy, such as the clients of the worker and Redis.

A worker that computes announces it by a name in the abstract namespace of Unix sockets. The name contains the CPUs that
the worker may use. The kernel lists these names in a file and removes them when their process ends. Containers with
their own network do not see each other's names.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from llamaq.worker.cpu_cores import usable_cpus
from llamaq.worker.process.other_programs import OtherPrograms
from llamaq.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.05
"""How often a worker looks for other workers that compute. When two begin at the same time, each token takes up to
250 ms until both have looked twice. A look takes less than 0.1 ms."""
IDLE_CHECKS = 40
"""A worker gives its cores to the others after this many checks without work. Fewer would change the number of threads
between jobs that follow each other closely."""
IDLE_CHECK_EVERY_S = 1.0
"""How often an idle worker looks. Otherwise it only wakes up when a command arrives for the engine thread."""
FEWER_AT, MORE_AT = 0.5, 0.75
"""A worker keeps a thread if at least this part of a CPU is left for it, and takes one more if that part is left. They
differ so that the number does not change each second."""
UNIX_SOCKETS = Path("/proc/net/unix")
"""Lists the Unix sockets of this host, one in a line. An abstract name is shown with a leading `@`."""
NAME_PREFIX = "llamaq.computing/"


class EngineThread(Protocol):
    """The parts of `CommandQueue` that this module uses."""

    has_woken: threading.Event
    """Set when the engine thread was idle and a command has arrived. Only this module clears it."""

    @property
    def is_idle(self) -> bool:
        """Whether the engine thread has no work."""

    def call(self, work: Callable[[], None]) -> object:
        """Run `work` on the engine thread before the next tick."""


class Announcement:
    """Tells the other workers of this host whether this worker computes, and counts those that do."""

    def __init__(self, cpus: Iterable[int], prefix: str = NAME_PREFIX) -> None:
        """Create the announcement of one worker, which does not compute yet.

        Args:
            cpus: The numbers of the CPUs that this worker may use.
            prefix: First part of the names of all workers.
        """
        self._cpus = sum(1 << cpu for cpu in cpus)
        self._prefix = prefix
        self._names = re.compile(rf" @{re.escape(prefix)}([0-9a-f]+)/(\w+)$".encode(), re.MULTILINE)
        self._own_token = ""
        """The last part of the own name."""
        self._socket: socket.socket | None = None

    def set_computing(self, is_computing: bool) -> None:
        """Publish whether this worker computes.

        Raises:
            OSError: The name cannot be published now.
        """
        if is_computing and self._socket is None:
            self._own_token = secrets.token_hex(8)  # a forked child of this process may still hold the last name
            announced = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                announced.bind(f"\0{self._prefix}{self._cpus:x}/{self._own_token}")
            except OSError:
                announced.close()
                raise
            self._socket = announced
        elif not is_computing and self._socket is not None:
            self._socket.close()
            self._socket = None

    def n_others(self) -> int:
        """Return the number of other workers that compute on CPUs of this worker."""
        found = self._names.findall(UNIX_SOCKETS.read_bytes())
        return sum(bool(int(cpus, 16) & self._cpus) and token.decode() != self._own_token for cpus, token in found)


class CoreSharing:
    """Adjusts the number of threads of one worker. A context manager: inside it, a thread looks for other workers."""

    def __init__(
        self,
        announcement: Announcement,
        engine_thread: EngineThread,
        set_n_threads: Callable[[int], None],
        *,
        count_ticks: Callable[[], int],
        n_cores: int,
        n_free_cpus: Callable[[], float],
    ) -> None:
        """Create the adjustment. The worker has one thread for each core now.

        Args:
            announcement: Tells the other workers when this one computes.
            engine_thread: Runs the ticks, and changes the number of threads between two of them.
            set_n_threads: Changes the number of threads; called on the engine thread.
            count_ticks: Returns the number of ticks until now.
            n_cores: Number of cores that the worker may use.
            n_free_cpus: Returns how many of its CPUs other programs leave to the worker, on average.
        """
        self._announcement = announcement
        self._engine_thread = engine_thread
        self._set_n_threads = set_n_threads
        self._count_ticks = count_ticks
        self._n_cores = n_cores
        self._n_free_cpus = n_free_cpus
        self._n_ticks = count_ticks()
        self._n_idle_checks = IDLE_CHECKS
        self._was_idle = True
        """Whether the engine thread was idle in the last check."""
        self.n_threads = n_cores
        """The number of threads that the engine has, or will have in its next tick."""
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llamaq-cores", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._engine_thread.has_woken.set()
        self._thread.join()
        self._announcement.set_computing(False)

    def _run(self) -> None:
        while not self._has_ended.wait(CHECK_EVERY_S):
            self._wait_while_idle()
            if self._has_ended.is_set():
                return
            with suppress(OSError):  # e.g. no file descriptor is free at the moment
                self.check()

    def _wait_while_idle(self) -> None:
        """Wait until this worker may compute, but at most `IDLE_CHECK_EVERY_S`. A job begins with a command."""
        has_woken, until_s = self._engine_thread.has_woken, time.monotonic() + IDLE_CHECK_EVERY_S
        while self._stays_idle() and (left_s := until_s - time.monotonic()) > 0:
            if not has_woken.wait(left_s) or self._has_ended.wait(CHECK_EVERY_S):
                return
            has_woken.clear()  # the command may be none of a job

    def _stays_idle(self) -> bool:
        """Return whether this worker does not compute, and has had no work since the last check."""
        is_idle = self._engine_thread.is_idle and self._count_ticks() == self._n_ticks
        return is_idle and self._n_idle_checks >= IDLE_CHECKS

    def check(self) -> None:
        """Announce whether this worker computes, and take its share of the cores.

        A worker without jobs takes its share too, so that it has the right number of threads when a job arrives.
        """
        self._n_idle_checks = 0 if self._has_computed() else self._n_idle_checks + 1
        self._announcement.set_computing(self._n_idle_checks < IDLE_CHECKS)
        n_workers, n_free = 1 + self._announcement.n_others(), self._n_free_cpus()
        # The busy time of other workers is not that of other programs. It is not known how much of it is theirs.
        n_threads = max(1, self._n_cores // n_workers if n_workers > 1 else self._n_fitting(n_free))
        if n_threads != self.n_threads:
            self.n_threads = n_threads
            log.debug("cores.shared n_threads=%d workers=%d free_cpus=%.1f", n_threads, n_workers, n_free)
            self._engine_thread.call(partial(self._set_n_threads, n_threads))

    def _n_fitting(self, n_free: float) -> int:
        """Return the number of threads, at most one for each core, for which other programs leave CPUs."""
        n_kept, n_taken = (min(self._n_cores, math.floor(n_free + 1 - part)) for part in (FEWER_AT, MORE_AT))
        return min(n_kept, max(n_taken, self.n_threads))

    def _has_computed(self) -> bool:
        """Return whether the engine thread has computed since the last check, or is in a tick that began before it.

        An idle engine thread wakes up for a moment each second, so one check does not show that it computes.
        """
        n_ticks_before, self._n_ticks = self._n_ticks, self._count_ticks()
        was_idle, self._was_idle = self._was_idle, self._engine_thread.is_idle
        return self._n_ticks > n_ticks_before or not (was_idle or self._was_idle)


def share_cores(
    settings: WorkerSettings,
    engine_thread: EngineThread,
    set_n_threads: Callable[[int], None],
    count_ticks: Callable[[], int],
) -> AbstractContextManager[object]:
    """Return a context in which the worker shares the cores. It does nothing where a number of threads is set.

    Args:
        settings: The settings of the worker.
        engine_thread: See `CoreSharing`.
        set_n_threads: See `CoreSharing`.
        count_ticks: See `CoreSharing`.
    """
    n_cores = settings.n_threads_alone
    if settings.n_threads is not None or n_cores == 1 or sys.platform != "linux":
        return nullcontext()
    cpus = usable_cpus(settings.cpus)
    others = OtherPrograms(cpus)
    return CoreSharing(
        Announcement(cpus),
        engine_thread,
        set_n_threads,
        count_ticks=count_ticks,
        n_cores=n_cores,
        n_free_cpus=lambda: len(cpus) - others.n_busy_cpus(),
    )
