"""Candidates for the next token, and the filters of llama.cpp's samplers over them.

Each filter gives the set that llama.cpp's sampler of the same name gives (src/llama-sampler.cpp) with `min_keep` 1.
None sorts a whole vocabulary: of 151,936 logits that takes some 20 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Places = npt.NDArray[np.intp]

BLOCK = 128
FEW = 1024
"""So many candidates are simply sorted; more are first put into bins."""
BINS_PER_UNIT, N_BINS = 32, 1024


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be drawn, in the order of their ids, and their logits."""

    tokens: Places
    logits: Logits

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, keep: npt.NDArray[np.bool_] | Places) -> Candidates:
        return Candidates(self.tokens[keep], self.logits[keep])

    def best_of(self, k: int) -> Candidates:
        """The `k` with the largest logits, of equal ones those with the smaller ids."""
        return self[np.sort(np.argsort(-self.logits, kind="stable")[:k])]

    @property
    def best(self) -> float:
        """The largest logit: NaN if any is, minus infinity without candidates."""
        return float(self.logits.max(initial=np.float32(-np.inf)))


def all_candidates(logits: Logits) -> Candidates:
    """Every token whose logit is not minus infinity."""
    finite = logits != -np.inf
    if finite.all():
        return Candidates(np.arange(logits.size), logits)
    tokens = np.flatnonzero(finite)
    return Candidates(tokens, logits[tokens])


def top_k(logits: Logits, k: int) -> Candidates:
    """The `k` largest logits, of equal ones those with the smaller ids, without those at minus infinity."""
    if k >= logits.size:
        return all_candidates(logits)
    tokens = _reaching_best(logits, k)
    chosen = Candidates(tokens, logits[tokens])
    if len(chosen) > k:
        chosen = chosen.best_of(k)
    return chosen if chosen.logits.min() != -np.inf else chosen[chosen.logits != -np.inf]


def typical_p(candidates: Candidates, p: float) -> Candidates:
    """The tokens whose surprise is nearest the entropy, with a mass over `p` (arXiv:2202.00666)."""
    weights = _weights(candidates, candidates.best)
    probabilities = weights / weights.sum(dtype=np.float64)
    surprise = -np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    distance = np.abs(surprise - probabilities @ surprise)
    return candidates[_nearest_with_mass(distance, probabilities, np.nextafter(p, 2))]


def top_p_min_p(candidates: Candidates, p: float, share: float) -> Candidates:
    """Top-p, then min-p: the fewest most probable tokens that together have at least the probability `p`, and of these
    the ones that are at least `share` times as probable as the best.

    Both keep a beginning of the descending order, so min-p goes first here and leaves less to sort.
    """
    best = candidates.best
    weights = _weights(candidates, best) if p < 1 else candidates.logits
    mass = p * float(weights.sum(dtype=np.float64))
    if share > 0:
        keep = np.flatnonzero(candidates.logits >= np.float32(best + log(share)))
        candidates, weights = candidates[keep], weights[keep]
    if p == 1:
        return candidates
    return candidates[_nearest_with_mass(np.float32(best) - candidates.logits, weights, mass)]


def _weights(candidates: Candidates, best: float) -> Logits:
    """Probabilities up to a common factor; that of the best is 1."""
    weights: Logits = np.exp(candidates.logits - np.float32(best))
    return weights


def _reaching_best(logits: Logits, k: int) -> Places:
    """The `k` tokens with the largest logits and perhaps some more, by id; a NaN is larger than all numbers.

    The k-th largest of the largest of each block is a bound that at least `k` logits reach, and not many more.
    """
    n_blocks = logits.size // BLOCK
    if n_blocks <= 2 * k:
        return np.flatnonzero(~(logits < np.partition(logits, logits.size - k)[logits.size - k]))
    # A block is a column: numpy takes maxima along the first axis much faster than along the last.
    blocks = logits[: n_blocks * BLOCK].reshape(BLOCK, n_blocks)
    maxima = blocks.max(axis=0)
    bound = np.partition(maxima, n_blocks - k)[n_blocks - k]
    columns = np.flatnonzero(~(maxima < bound))
    rows, places = np.divmod(np.flatnonzero(~(blocks.take(columns, axis=1) < bound)), len(columns))
    rest = np.flatnonzero(~(logits[n_blocks * BLOCK :] < bound)) + n_blocks * BLOCK
    return np.concatenate((rows * n_blocks + columns[places], rest))


def _nearest_with_mass(distance: Logits, weights: npt.NDArray[np.floating], mass: float) -> Places:
    """Places of the fewest candidates, nearest first, whose weights add up to `mass`; in ascending order."""
    edge = np.arange(len(distance))
    nearer, mass_nearer = edge[:0], 0.0
    if len(distance) > FEW:
        bins = np.minimum(distance * BINS_PER_UNIT, N_BINS - 1).astype(np.int16)
        reached = np.cumsum(np.bincount(bins, weights, N_BINS))
        border = min(int(reached.searchsorted(mass)), N_BINS - 1)
        nearer, edge = np.flatnonzero(bins < border), np.flatnonzero(bins == border)
        mass_nearer = reached[border - 1] if border else 0.0
    edge = edge[np.argsort(distance[edge], kind="stable")]
    n_kept = int(np.cumsum(weights[edge], dtype=np.float64).searchsorted(mass - mass_nearer)) + 1
    kept = np.concatenate((nearer, edge[:n_kept])) if len(nearer) else edge[:n_kept]
    kept.sort()
    return kept
