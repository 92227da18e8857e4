"""Finds the largest logits of a vocabulary in one pass over its memory.

The logits are divided into blocks. If at least `k` blocks have a larger maximum than a block, this block has none of
the `k` largest logits. So after the pass only about `k` blocks are read again.
"""

from __future__ import annotations

from functools import lru_cache
from math import isnan

import numpy as np

from llamaq.worker.generation.sampling.candidates import Indices, Logits

MAX_BLOCK = 512
"""Largest number of logits in one block. With larger blocks, more logits are read again. With smaller blocks, the first
pass takes longer."""
SMALLEST = float(np.finfo(np.float32).min)


def top_k_superset(logits: Logits, k: int) -> tuple[Indices, float]:
    """Return the indices of the `k` largest logits, and possibly more, in ascending order; and the largest logit.

    The indices are those of the logits that are at least the k-th largest maximum of a block: these are at least `k`
    logits, and usually only a few more. Logits of minus infinity are not among them.

    The largest logit is NaN if any logit is NaN. Then the indices have no meaning.

    Args:
        logits: The logits, shape (n_logits,).
        k: Number of logits, at least 1. It may be larger than `n_logits`.
    """
    size, starts = _blocks(logits.size, k)
    n_blocks = len(starts)
    blocks, rest = logits[: n_blocks * size].reshape(n_blocks, size), logits[n_blocks * size :]
    # numpy finds the place of a maximum much faster than its value.
    maxima = logits.take(blocks.argmax(axis=1) + starts)
    ranked = maxima.copy()
    ranked.sort()  # NaN is the last
    largest: float = ranked.item(-1)
    least = max(ranked.item(-min(k, n_blocks)), SMALLEST)
    chosen = (maxima >= least).nonzero()[0]
    found = (blocks.take(chosen, axis=0) >= least).ravel().nonzero()[0]
    indices: Indices = chosen.take(found // size) * size + found % size
    if rest.size:
        largest_of_rest = rest.item(rest.argmax())
        if isnan(largest_of_rest) or largest_of_rest > largest:
            largest = largest_of_rest
        if largest_of_rest >= least:
            indices = np.concatenate((indices, (rest >= least).nonzero()[0] + n_blocks * size))
    return indices, largest


@lru_cache(maxsize=64)
def _blocks(n_logits: int, k: int) -> tuple[int, Indices]:
    """Return the number of logits in a block, and the index of the first logit of each block."""
    size = min(MAX_BLOCK, max(1, n_logits // (4 * k)))  # clearly more than `k` blocks
    starts: Indices = np.arange(n_logits // size) * size
    return size, starts
