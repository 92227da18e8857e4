"""A background thread for slow work, such as disk operations."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundThread:
    """A daemon thread that executes submitted calls in order. Urgent calls come before all other calls."""

    def __init__(self, name: str) -> None:
        """Start the thread under this name."""
        self._changed = threading.Condition()
        self._urgent: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._others: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_busy = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        """Queue a call and return the future of its result. After `close`, return a cancelled future instead."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
            else:
                (self._urgent if urgent else self._others).append((future, call))
                self._changed.notify_all()
        return future

    def flush(self, timeout_s: float) -> bool:
        """Wait until all submitted calls are executed. False when this takes longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._n_waiting and not self._is_busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Execute the submitted calls for at most `timeout_s`, cancel the remaining ones, and stop the thread.

        Returns False when a submitted call was not executed in time.
        """
        deadline_s = time.monotonic() + timeout_s
        is_done = self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            for future, _ in (*self._urgent, *self._others):
                future.cancel()
            self._urgent.clear()
            self._others.clear()
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return is_done

    @property
    def _n_waiting(self) -> int:
        return len(self._urgent) + len(self._others)

    def _run(self) -> None:
        while next_call := self._next():
            future, call = next_call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as exc:  # noqa: BLE001 - the caller gets it from the future
                future.set_exception(exc)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._n_waiting or self._is_closed)
            if self._is_closed:
                return None
            self._is_busy = True
            return (self._urgent or self._others).popleft()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "busy" if self._is_busy else "idle"
        return f"<BackgroundThread {self._thread.name} {state} {self._n_waiting} waiting>"
