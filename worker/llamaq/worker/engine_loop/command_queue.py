"""The queue of commands: calls that other threads want the engine thread to make between two ticks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

WAKE_UP_S = 0.0001
"""About the time in which an idle engine thread wakes up."""


class CommandQueue:
    """Passes commands to the engine thread, which runs them in the order in which they were put.

    Threads: any thread may call `put`, `put_and_wake` and `call`, and read `is_idle`. A signal handler may call `put`.
    The engine thread calls `run_next` and `run_all`.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.is_idle = False
        """Whether the engine thread has no work and waits for a command."""
        self.has_woken = threading.Event()
        """Set by the engine thread when a command has ended its wait. The one thread that waits for it clears it."""

    def put(self, command: Callable[[], object]) -> None:
        """Let the engine thread run `command` before its next tick."""
        self._commands.put(command)

    def put_and_wake(self, command: Callable[[], object]) -> None:
        """Put a command, and let an idle engine thread begin with it at once.

        The engine thread needs the GIL when it wakes up. The calling thread would keep the GIL for up to its switch
        interval, so it sleeps for a moment.
        """
        was_idle = self.is_idle
        self._commands.put(command)
        if was_idle:
            time.sleep(WAKE_UP_S)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine thread before its next tick. The future returns its result or raises its error."""
        future: Future[T] = Future()

        def run_work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as exc:  # noqa: BLE001 - the caller gets it from the future
                    future.set_exception(exc)

        self._commands.put(run_work)
        return future

    @property
    def is_empty(self) -> bool:
        """Whether no command has arrived that was not run."""
        return self._commands.empty()

    def run_next(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for a command, and run it. Returns False if none has arrived."""
        self.is_idle = True
        try:
            command = self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return False
        finally:
            self.is_idle = False
        self.has_woken.set()
        command()
        return True

    def run_all(self) -> None:
        """Run the commands that have arrived, without a wait."""
        while not self._commands.empty():
            self._commands.get_nowait()()

    def __repr__(self) -> str:
        return f"<CommandQueue {self._commands.qsize()} waiting>"
