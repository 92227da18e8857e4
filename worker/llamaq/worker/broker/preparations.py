"""Prepares claimed jobs, the slow ones on other threads, and passes on the jobs that are ready in groups."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from llamaq.common.protocol.job_events import TokenSpan
from llamaq.worker.broker.job_claims import ClaimedJob
from llamaq.worker.broker.read_order import Place
from llamaq.worker.core.job import Lease, PreparedJob
from llamaq.worker.core.job_times import JobTimes

N_THREADS = 3
"""Number of threads that tokenize and compile grammars."""
N_THREADS_OF_KIND = 2
"""At most this number of them prepare jobs with a grammar at the same time, and at most this number are started for
other jobs. A grammar may take seconds, and other jobs do not wait for it."""
QUICK_S = 0.002
"""How long the I/O thread prepares quick jobs before it leaves the rest to other threads. A quick job takes a tenth of
this time; to wake another thread for it, and then the I/O thread, would take longer."""
HELP_AFTER_S = 0.002
"""How long jobs wait for a thread before one more takes some of them. Most jobs take a tenth of this time, and several
threads would only take the GIL from each other."""


class Preparer(Protocol):
    """Turns the bytes of requests into jobs that the engine can run. Thread-safe."""

    def is_quick(self, payload: bytes) -> bool:
        """Return whether the job of an encoded request is prepared in less than a millisecond, without a grammar."""

    def may_have_grammar(self, payload: bytes) -> bool:
        """Return False only if the job of an encoded request has no grammar that must be compiled."""

    def prepare(self, payload: bytes, lease: Lease, published: TokenSpan, times: JobTimes) -> PreparedJob:
        """Return the job of an encoded request, with the output that earlier attempts have published.

        Raises:
            JobRejected: The request is not valid, or its job cannot run on this worker.
        """


class PreparationPanic(RuntimeError):
    """A preparation raised an error that is no `Exception`, such as a panic in Rust: the cause of this error."""


@dataclass(slots=True)
class Preparation:
    """A claimed job that is prepared."""

    claimed: ClaimedJob
    lease: Lease
    place: Place
    """The place of the job in the order of its priority."""
    may_have_grammar: bool = True
    """Whether the preparation may take seconds, because it compiles a grammar."""
    outcome: PreparedJob | Exception | None = None
    """The prepared job, or the error of its preparation. None: the preparation has not ended."""


class Preparations:
    """Prepares quick jobs at once, and the others as soon as a thread is free.

    Jobs with a grammar and jobs without one wait in separate lines, each in the order in which its jobs were added.

    There is no task and no callback for each job: a thread prepares one job after the other. When the I/O thread wakes
    up, it gets all jobs that are ready.

    Threads: the I/O thread calls all methods, and `on_ready` runs on it. The threads of the executor run the preparer
    for jobs that are not quick.
    """

    def __init__(
        self, preparer: Preparer, executor: Executor, on_ready: Callable[[Sequence[Preparation]], None]
    ) -> None:
        """Create the object on the running event loop.

        Args:
            preparer: Prepares each job.
            executor: Its threads prepare the jobs that are not quick.
            on_ready: Called with the jobs whose preparation has ended.
        """
        self._preparer = preparer
        self._executor = executor
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: deque[Preparation] = deque()
        """The jobs without a grammar. The lock protects this and the next three attributes."""
        self._waiting_grammars: deque[Preparation] = deque()
        self._n_threads = 0
        """Number of threads that take jobs."""
        self._n_grammar_threads = 0
        """Number of threads that prepare a job with a grammar."""
        self._ready: deque[Preparation] = deque()
        self._is_announced = False
        """Whether a call of `_deliver` is on its way to the I/O thread."""
        self._is_helped_soon = False
        """Whether a call of `_help` is scheduled."""
        self._is_closed = False

    def add(self, preparations: Sequence[Preparation]) -> None:
        """Prepare these jobs. Jobs that are quick to prepare are handed over before this call returns."""
        until_s = self._loop.time() + QUICK_S
        quick: list[Preparation] = []
        slow: list[Preparation] = []
        for one in preparations:
            attempt = one.claimed.attempt
            is_quick = not attempt.generated and self._preparer.is_quick(attempt.request)
            if is_quick and self._loop.time() < until_s:
                self._prepare(one)
                quick.append(one)
            else:
                one.may_have_grammar = self._preparer.may_have_grammar(attempt.request)
                slow.append(one)
        if slow:
            self._add_slow(slow)
        if quick:
            self._on_ready(quick)

    def _add_slow(self, preparations: Sequence[Preparation]) -> None:
        with self._lock:
            for one in preparations:
                (self._waiting_grammars if one.may_have_grammar else self._waiting).append(one)
            is_busy = self._n_threads > 0
        if not is_busy:
            self._start_thread()
        if not self._is_helped_soon:
            self._is_helped_soon = True
            self._loop.call_later(HELP_AFTER_S, self._help)

    def _help(self) -> None:
        """Let another thread take jobs, if some still wait, and look again later."""
        self._is_helped_soon = self._start_thread()
        if self._is_helped_soon:
            self._loop.call_later(HELP_AFTER_S, self._help)

    def _start_thread(self) -> bool:
        """Let one more thread take jobs, if one is left and a job waits for it. Return whether it is started."""
        with self._lock:
            n_others = self._n_threads - self._n_grammar_threads
            has_job = self._has_next_grammar() or (bool(self._waiting) and n_others < N_THREADS_OF_KIND)
            if not has_job or self._n_threads >= N_THREADS:
                return False
            self._n_threads += 1
        self._executor.submit(self._work)
        return True

    def close(self) -> None:
        """Drop all jobs. `on_ready` is not called any more."""
        self._is_closed = True
        with self._lock:
            self._waiting.clear()
            self._waiting_grammars.clear()

    def _prepare(self, one: Preparation) -> None:
        try:
            lease, attempt = one.lease, one.claimed.attempt
            one.outcome = self._preparer.prepare(attempt.request, lease, one.claimed.published, one.claimed.times)
        except Exception as exc:  # noqa: BLE001 - it is the outcome, and affects this job alone
            one.outcome = exc
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, which is no fault of the job
            # The panic of a library in Rust is no `Exception`. It is the outcome of this job too, see `Publisher`.
            one.outcome = PreparationPanic(f"the preparation ended with {type(exc).__name__}")
            one.outcome.__cause__ = exc

    # ---- the threads of the executor

    def _work(self) -> None:
        """Prepare jobs until none is left."""
        while (one := self._take()) is not None:
            self._prepare(one)
            outcome = one.outcome  # which belongs to the I/O thread from the next line on
            self._ready.append(one)
            if not self._is_announced:
                self._is_announced = True
                with suppress(RuntimeError):  # the event loop is closed: the process is about to exit
                    self._loop.call_soon_threadsafe(self._deliver)
            if isinstance(outcome, PreparedJob) and outcome.finish_preparation is not None:
                outcome.finish_preparation()
            del outcome  # the next preparation may take long, and the job may end meanwhile
            if one.may_have_grammar:
                with self._lock:
                    self._n_grammar_threads -= 1

    def _take(self) -> Preparation | None:
        """Return the next job for this thread. None: there is none, and the thread takes no more jobs."""
        with self._lock:
            if self._has_next_grammar():
                self._n_grammar_threads += 1
                return self._waiting_grammars.popleft()
            if self._waiting:
                return self._waiting.popleft()
            self._n_threads -= 1
            return None

    def _has_next_grammar(self) -> bool:
        """Return whether one more thread may compile a grammar, and one waits. The caller holds the lock."""
        return bool(self._waiting_grammars) and self._n_grammar_threads < N_THREADS_OF_KIND

    # ---- the I/O thread

    def _deliver(self) -> None:
        self._is_announced = False  # before the read, so that later additions are announced again
        ready = [self._ready.popleft() for _ in range(len(self._ready))]
        if not self._is_closed:
            self._on_ready(ready)
            return
        for one in ready:
            if isinstance(one.outcome, PreparedJob):
                one.outcome.job.close()

    def __repr__(self) -> str:
        n_waiting = len(self._waiting) + len(self._waiting_grammars)
        return f"<Preparations waiting={n_waiting} ready={len(self._ready)}>"
