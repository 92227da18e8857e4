"""Runs a function on a thread with a large stack. llguidance recurses once for each rule that refers to another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 512 * 1024 * 1024
"""llguidance needs 30 kB of stack for each level, and a grammar of 64 KiB has 8,000 levels at most. The system provides
the memory of a stack only when it is used."""

_lock = threading.Lock()


def on_large_stack(work: Callable[[], T]) -> T:
    """Run `work` on a new thread with a stack of `STACK_BYTES`, and return its result or raise its error."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:  # noqa: BLE001  # raised below, on the thread of the caller
            errors.append(exc)

    with _lock:  # the size of the next stack is a global setting of Python
        earlier_bytes = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="llamaq-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(earlier_bytes)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
