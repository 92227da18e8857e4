"""Reads the logits of many slots in several threads.

Logits that a GPU has written are in no cache of the CPU. One thread reads a row of 151,936 in 0.1 ms, so 32 rows take
longer than the rest of the work between two ticks. Several threads read several rows at once. They run only numpy's
passes over the rows, which release the GIL. Whole draws in threads are slower than on one thread: a draw has many
short calls, and each of them waits for the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from llamaq.worker.core.job_parts import Sampler

MIN_ROWS = 8
"""With fewer rows, to wake the threads takes longer than they save."""

Best = list[int | None]
"""For each row, the token with the largest logit. None: the sampler does not need it."""


class LogitScan:
    """The threads, and the calls that run in them.

    Args:
        n_threads: Number of threads that read, the calling one included. At least 2.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads - 1, "logits")

    def read(self, rows: npt.NDArray[np.float32], samplers: Sequence[Sampler]) -> Best:
        """Read each row once: find its largest logit, or let its sampler find what the next draw needs.

        Args:
            rows: The logits, shape (n_rows, n_vocab).
            samplers: The sampler of each row.
        """
        size = -(-len(samplers) // self._n_threads)
        parts = [(rows[at : at + size], samplers[at : at + size]) for at in range(0, len(samplers), size)]
        others = [self._pool.submit(_read, *part) for part in parts[1:]]
        best = _read(*parts[0])
        for other in others:
            best += other.result()
        return best

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def __repr__(self) -> str:
        return f"<LogitScan {self._n_threads} threads>"


def _read(rows: npt.NDArray[np.float32], samplers: Sequence[Sampler]) -> Best:
    best: Best = []
    for row, sampler in zip(rows, samplers, strict=True):
        if sampler.checks_logits:
            sampler.scan(row)
            best.append(None)
        else:
            best.append(int(row.argmax()))
    return best
