"""The running sums of weights, searched without computing each of them.

numpy adds up a whole vocabulary one weight after the other in about 2 ms, and the sums of blocks in 0.05 ms.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamaq.worker.generation.sampling.candidates import Logits

BLOCK = 512
"""Number of weights in one block."""
MAX_SINGLE = 1024
"""Up to this number of weights, each sum is computed."""


class RunningSums:
    """The sums of the first 1, 2, 3, ... weights, in float64.

    Args:
        weights: At least one weight; none is negative, and at least one is above 0.
    """

    def __init__(self, weights: Logits) -> None:
        self._weights = weights
        self._size = BLOCK if len(weights) > MAX_SINGLE else 1
        """Number of weights for each sum in `_ends`."""
        if self._size == 1:
            self._ends = weights.cumsum(dtype=np.float64)
        else:
            blocked = len(weights) // BLOCK * BLOCK
            sums = weights[:blocked].reshape(-1, BLOCK).sum(axis=1, dtype=np.float64)
            self._ends = np.append(sums, weights[blocked:].sum(dtype=np.float64)).cumsum()
        self.total: float = self._ends.item(-1)

    def first_above(self, value: float) -> int:
        """Return the index of the first sum that is larger than a value of at least 0.

        The weight at this index is above 0. If rounding makes all sums too small, it is the last weight above 0.
        """
        block = _first_above(self._ends, value)
        if self._size == 1:
            return block
        first = block * BLOCK
        before = self._ends.item(block - 1) if block else 0.0
        sums = self._weights[first : first + BLOCK].cumsum(dtype=np.float64)
        return first + _first_above(sums, value - before)


def _first_above(sums: npt.NDArray[np.float64], value: float) -> int:
    index = int(sums.searchsorted(value, side="right"))
    return index if index < len(sums) else int(sums.searchsorted(sums[-1]))
