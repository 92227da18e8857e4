"""Whether a call leaves the event loop to other tasks while it decodes something large."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

LONGEST_SHARE = 0.75
"""A decoding in the event loop, or in one call that keeps the GIL, leaves a gap as long as the decoding itself."""
TRY_S = 60.0
"""Other processes slow the threads of some of the tries: a thread gets the GIL only when it gets a processor too. After
this time, the event loop counts as blocked."""


async def check_gaps(decode: Callable[[], object], read: Callable[[], Awaitable[object]]) -> None:
    """Check that the event loop runs other tasks while `read` decodes what `decode` decodes.

    Times are processor times of all threads of this process. They do not grow while other processes run. Each gap is
    compared with the shortest decoding so far, so that a slow decoding does not excuse a long gap.
    """
    decode_s, shares, end_s = math.inf, list[float](), time.monotonic() + TRY_S
    with _without_earlier_objects():
        while not shares or shares[-1] >= LONGEST_SHARE:
            assert time.monotonic() < end_s, shares
            began_s = time.process_time()
            decode()
            decode_s = min(decode_s, time.process_time() - began_s)
            shares.append(await _longest_gap_s(asyncio.ensure_future(read())) / decode_s)


@contextmanager
def _without_earlier_objects() -> Iterator[None]:
    """Within this context, the garbage collector does not visit the objects of earlier tests. A collection that visits
    millions of them takes longer than the decoding, and stops all threads.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _longest_gap_s(task: asyncio.Future[object]) -> float:
    """Return the longest processor time in seconds in which no other task ran, until a task is done."""
    longest_s, last_s = 0.0, time.process_time()
    while not task.done():
        await asyncio.sleep(0)
        now_s = time.process_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s
