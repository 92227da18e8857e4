"""Finds the largest logits of a vocabulary in one pass over its memory.

The logits are the rows of a table, one row after the other, and the maximum of each column is computed. If at least `k`
columns have a larger maximum than a column, this column has none of the `k` largest logits. So after the pass only
about `k` columns are read again.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from llamaq.worker.generation.sampling.candidates import Indices, Logits

COLUMN = 64
"""Usual number of logits in one column. With longer columns, more logits are read again. With shorter columns, more
maxima are sorted."""
COLUMNS_PER_K = 16
"""Smallest number of columns for each of the `k` largest logits. With fewer columns, most logits are read again."""
SMALLEST = float(np.finfo(np.float32).min)


def top_k_superset(logits: Logits, k: int) -> tuple[Indices, float]:
    """Return the indices of the `k` largest logits, and possibly more, in ascending order; and the largest logit.

    The indices are those of the logits that are at least the k-th largest maximum of a column: these are at least `k`
    logits, and usually only a few more. Logits of minus infinity are not among them.

    The largest logit is NaN if any logit is NaN. Then the indices have no meaning.

    Args:
        logits: The logits, shape (n_logits,).
        k: Number of logits, at least 1. It may be larger than `n_logits`.
    """
    n_columns = _n_columns(logits.size, k)
    n_in_table = logits.size // n_columns * n_columns
    table, rest = logits[:n_in_table].reshape(-1, n_columns), logits[n_in_table:]
    maxima = np.maximum.reduce(table, axis=0)
    if rest.size:
        first = maxima[: rest.size]
        np.maximum(first, rest, out=first)
    ranked = maxima.copy()
    ranked.sort()  # NaN is the last
    least = max(ranked.item(-min(k, n_columns)), SMALLEST)
    chosen = (maxima >= least).nonzero()[0]
    found = (table.take(chosen, axis=1) >= least).ravel().nonzero()[0]
    row, place = np.divmod(found, chosen.size or 1)
    indices: Indices = row * n_columns + chosen.take(place)
    if rest.size and (of_rest := (rest >= least).nonzero()[0]).size:
        indices = np.concatenate((indices, of_rest + n_in_table))
    return indices, ranked.item(-1)


@lru_cache(maxsize=64)
def _n_columns(n_logits: int, k: int) -> int:
    return min(n_logits, max(n_logits // COLUMN, COLUMNS_PER_K * k))
