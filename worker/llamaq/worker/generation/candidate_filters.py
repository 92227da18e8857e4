"""The candidates for the next token, and the filters of the sampler chain: top-n-sigma, top-k, typical-p and others.

Each filter keeps the same candidates as the sampler of the same name in llama.cpp (src/llama-sampler.cpp) with
`min_keep` = 1. No filter sorts a whole vocabulary, because sorting 151,936 logits takes about 20 ms.

Arrays have one dimension: (n_vocab,) for logits of the whole vocabulary, (n_candidates,) for logits of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.intp]
Indices = npt.NDArray[np.intp]

BLOCK_LOGITS = 128
"""Logits in one block of `_top_k_superset`."""
SORT_LIMIT = 1024
"""Up to this number of candidates are sorted directly. More candidates are first counted in bins."""
MAX_XTC_THRESHOLD = 0.5
"""Above it, at most one token can be a top choice."""
BINS_PER_NAT, N_BINS = 32, 1024


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may be drawn, in ascending order of ids. Corresponds to llama_token_data_array of llama.cpp."""

    tokens: TokenIds
    """Token ids, shape (n_candidates,)."""
    logits: Logits
    """Logits of the tokens, shape (n_candidates,)."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, selection: npt.NDArray[np.bool_] | Indices) -> Candidates:
        return Candidates(self.tokens[selection], self.logits[selection])

    def largest(self, k: int) -> Candidates:
        """Return the `k` candidates with the largest logits. Among equal logits, smaller ids are kept."""
        return self[np.sort(np.argsort(-self.logits, kind="stable")[:k])]

    @property
    def max_logit(self) -> float:
        """The largest logit: NaN if any logit is NaN, minus infinity if there are no candidates."""
        return float(self.logits.max(initial=np.float32(-np.inf)))


def unmasked_candidates(logits: Logits) -> Candidates:
    """Return all tokens whose logit is not minus infinity."""
    unmasked = logits != -np.inf
    if unmasked.all():
        return Candidates(np.arange(logits.size), logits)
    tokens = np.flatnonzero(unmasked)
    return Candidates(tokens, logits[tokens])


def top_k(logits: Logits, k: int) -> Candidates:
    """Return the `k` tokens with the largest logits, without tokens whose logit is minus infinity.

    Among equal logits, smaller ids are kept. Source: llama_sampler_top_k.
    """
    if k >= logits.size:
        return unmasked_candidates(logits)
    tokens = _top_k_superset(logits, k)
    chosen = Candidates(tokens, logits[tokens])
    if len(chosen) > k:
        chosen = chosen.largest(k)
    return chosen if chosen.logits.min() != -np.inf else chosen[chosen.logits != -np.inf]


def mask_below_sigma(logits: Logits, n: float) -> None:
    """Set the logits that are more than `n` standard deviations below the largest to minus infinity, in place.

    Logits that are minus infinity do not count. Source: Tang et al., Top-n-sigma (arXiv:2411.07641);
    llama_sampler_top_n_sigma.
    """
    unmasked = logits[logits != -np.inf]
    if len(unmasked) > 1:
        bound = unmasked.max() - n * unmasked.std(dtype=np.float64)
        logits[logits < bound] = -np.inf


def exclude_top_choices(candidates: Candidates, threshold: float) -> Candidates:
    """Return the candidates without those of at least the probability `threshold`, of which the last one stays.

    Source: llama_sampler_xtc. The caller decides by chance whether the filter is applied.
    """
    weights = _weights(candidates, candidates.max_logit)
    tops = np.flatnonzero(weights >= threshold * weights.sum(dtype=np.float64))
    if threshold > MAX_XTC_THRESHOLD or len(tops) < 2:
        return candidates
    last = tops[np.argsort(candidates.logits[tops], kind="stable")[0]]
    kept = np.ones(len(candidates), np.bool_)
    kept[tops] = False
    kept[last] = True
    return candidates[kept]


def dynamic_temperature(candidates: Candidates, temperature: float, spread: float, exponent: float) -> float:
    """Return the temperature for these candidates: low + (high - low) * (H / ln(n)) ** exponent.

    H is the entropy of the candidates in nats, n their number, low and high are `temperature` minus (at least 0) and
    plus `spread`. Source: llama_sampler_temp_ext.
    """
    low, high = max(0.0, temperature - spread), temperature + spread
    if len(candidates) < 2:
        return high
    weights = _weights(candidates, candidates.max_logit).astype(np.float64)
    probabilities = weights / weights.sum()
    present = probabilities[probabilities > 0]
    entropy = -float(present @ np.log(present))
    normalized = entropy / log(len(candidates))
    return low + (high - low) * float(normalized**exponent)


def typical_p(candidates: Candidates, p: float) -> Candidates:
    """Return the smallest set of the most typical candidates whose total probability is above `p`.

    The most typical candidate i has the smallest |-ln(p_i) - H|, where H = -sum(p_i ln(p_i)) is the entropy in nats.
    Source: Meister et al., Locally Typical Sampling (arXiv:2202.00666); llama_sampler_typical.
    """
    weights = _weights(candidates, candidates.max_logit)
    probabilities = weights / weights.sum(dtype=np.float64)
    surprise = -np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    distance = np.abs(surprise - probabilities @ surprise)
    # llama.cpp requires sum > p here, but sum >= p for top-p. sum > p is the same as sum >= the next float after p.
    return candidates[_nearest_with_mass(distance, probabilities, np.nextafter(p, 2))]


def top_p_min_p(candidates: Candidates, p: float, min_p: float) -> Candidates:
    """Return the candidates that both top-p and min-p keep.

    Top-p keeps the smallest set of the most probable candidates whose total probability is at least `p`. Min-p keeps
    the candidates with p_i >= min_p * max(p), which is equivalent to logit_i >= max(logit) + ln(min_p). Each filter
    keeps the first candidates in descending order of probability, so the order of the filters does not change the
    result. Here min-p comes first, because it leaves fewer candidates to sort.

    Sources: Holtzman et al., The Curious Case of Neural Text Degeneration (arXiv:1904.09751), llama_sampler_top_p;
    Nguyen et al., Min-p Sampling (arXiv:2407.01082), llama_sampler_min_p.

    Args:
        candidates: The candidates.
        p: The probability for top-p; 1 keeps all.
        min_p: The factor for min-p; 0 keeps all.
    """
    max_logit = candidates.max_logit
    weights = _weights(candidates, max_logit) if p < 1 else candidates.logits
    mass = p * float(weights.sum(dtype=np.float64))
    if min_p > 0:
        kept = np.flatnonzero(candidates.logits >= np.float32(max_logit + log(min_p)))
        candidates, weights = candidates[kept], weights[kept]
    if p == 1:
        return candidates
    return candidates[_nearest_with_mass(np.float32(max_logit) - candidates.logits, weights, mass)]


def _weights(candidates: Candidates, max_logit: float) -> Logits:
    """Return the softmax of the logits without its normalization: exp(logit_i - max_logit)."""
    weights: Logits = np.exp(candidates.logits - np.float32(max_logit))
    return weights


def _top_k_superset(logits: Logits, k: int) -> TokenIds:
    """Return the `k` tokens with the largest logits, and possibly more, in ascending order. NaN counts as the largest.

    The logits are divided into blocks. The result has the logits that are at least the k-th largest block maximum:
    these are at least `k` logits, and usually only a few more.
    """
    n_blocks = logits.size // BLOCK_LOGITS
    if n_blocks <= 2 * k:
        return np.flatnonzero(~(logits < np.partition(logits, logits.size - k)[logits.size - k]))
    # Each block is a column, because numpy computes maxima along the first axis much faster than the last.
    blocks = logits[: n_blocks * BLOCK_LOGITS].reshape(BLOCK_LOGITS, n_blocks)
    maxima = blocks.max(axis=0)
    bound = np.partition(maxima, n_blocks - k)[n_blocks - k]
    columns = np.flatnonzero(~(maxima < bound))
    rows, column_indices = np.divmod(np.flatnonzero(~(blocks.take(columns, axis=1) < bound)), len(columns))
    rest = np.flatnonzero(~(logits[n_blocks * BLOCK_LOGITS :] < bound)) + n_blocks * BLOCK_LOGITS
    return np.concatenate((rows * n_blocks + columns[column_indices], rest))


def _nearest_with_mass(distance: Logits, weights: npt.NDArray[np.floating], mass: float) -> Indices:
    """Return the nearest candidates: as few as possible, but with weights that sum to at least `mass`.

    Args:
        distance: Distance of each candidate in nats, shape (n_candidates,).
        weights: Weight of each candidate, shape (n_candidates,).
        mass: The sum to reach, in the unit of the weights.

    Returns:
        Indices of the candidates, in ascending order.
    """
    edge = np.arange(len(distance))  # the candidates that must be sorted
    nearer, mass_nearer = edge[:0], 0.0  # the candidates that are kept without sorting
    if len(distance) > SORT_LIMIT:
        bins = np.minimum(distance * BINS_PER_NAT, N_BINS - 1).astype(np.int16)
        reached = np.cumsum(np.bincount(bins, weights, N_BINS))
        edge_bin = min(int(reached.searchsorted(mass)), N_BINS - 1)
        nearer, edge = np.flatnonzero(bins < edge_bin), np.flatnonzero(bins == edge_bin)
        mass_nearer = reached[edge_bin - 1] if edge_bin else 0.0
    edge = edge[np.argsort(distance[edge], kind="stable")]
    n_kept = int(np.cumsum(weights[edge], dtype=np.float64).searchsorted(mass - mass_nearer)) + 1
    kept = np.concatenate((nearer, edge[:n_kept])) if len(nearer) else edge[:n_kept]
    kept.sort()
    return kept
