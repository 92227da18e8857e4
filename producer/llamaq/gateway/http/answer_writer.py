"""Writes large answers on a thread, so that the event loop serves other requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_QUICK_BYTES = 64 * 1024
"""Answers with more binary numbers than this are written on a thread, because this takes more than 5 ms."""
_WRITER = ThreadPoolExecutor(1, "answer-writer")
"""One thread for all answers: with several, the event loop would wait for each of them to get the GIL."""

T = TypeVar("T")


async def write_if_large_off_the_loop(n_bytes: int, write: Callable[[], T]) -> T:
    """Return what `write` returns. It is called on a thread if it takes long.

    Args:
        n_bytes: Size of the binary numbers that it writes as JSON.
        write: Writes the answer, in many short steps: a single call of an encoder keeps the GIL until it returns.
    """
    if n_bytes <= MAX_QUICK_BYTES:
        return write()
    return await asyncio.get_running_loop().run_in_executor(_WRITER, write)
