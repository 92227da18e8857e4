"""Draws the tokens of several rows of logits in one call, if their draws depend on the logits alone.

A compiled worker does this in C++ (`native_row_draws.cpp`), on several threads where cores are free. A GPU waits for
the draws before it can begin the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from llamaq.worker.core.job_parts import RowDraw

LogitRows: TypeAlias = npt.NDArray[np.float32]
"""The logits of several tokens, shape (n_rows, n_vocab)."""
NativeDraws: TypeAlias = Callable[[LogitRows, list[RowDraw | None], int], list[int | None]]
"""`draw_rows` in `native_row_draws.cpp`: see `NativeRowDrawer.draw`. The last argument is the number of threads."""


def load_native_draws() -> NativeDraws | None:
    """Return the compiled draws. None: this worker is not compiled."""
    try:
        draw_rows: NativeDraws = import_module("llamaq.worker.generation.sampling.native_row_draws").draw_rows
    except ImportError:
        return None
    return draw_rows


NATIVE_DRAWS = load_native_draws()
"""None: this worker is not compiled."""


class NativeRowDrawer:
    """Draws the tokens of rows of logits; implements `engine.RowDrawer`.

    Args:
        native: The compiled draws.
        n_threads: Number of threads, which need cores that nothing else uses meanwhile.
    """

    def __init__(self, native: NativeDraws, n_threads: int) -> None:
        self._native = native
        self._n_threads = n_threads

    def draw(self, rows: LogitRows, draws: Sequence[RowDraw | None]) -> list[int | None]:
        """Draw a token from each row. The logits of masked tokens become minus infinity.

        Args:
            rows: The logits, shape (n_rows, n_vocab).
            draws: How the token of each row is drawn. None: it is not drawn.

        Returns:
            The drawn tokens. None: there is no draw, a logit is NaN or plus infinity, or all are minus infinity.
        """
        return self._native(rows, list(draws), self._n_threads)
