"""The filters of the sampler chain: top-k, top-p, min-p and others.

Each filter keeps the same candidates as the sampler of the same name in llama.cpp (src/llama-sampler.cpp). As in
llama.cpp, sorted candidates are cut, and a small number of unsorted candidates is sorted first. No filter sorts a whole
vocabulary, because sorting 151,936 logits takes about 20 ms.

No logit is NaN or minus infinity, unless a function says otherwise, and there is at least one candidate.
"""

from __future__ import annotations

from math import log

import numpy as np
import numpy.typing as npt

from llamaq.worker.generation.sampling.candidates import Candidates, Indices
from llamaq.worker.generation.sampling.largest_logits import top_k_superset

SORT_LIMIT = 1024
"""Up to this number of candidates are sorted directly. More candidates are first counted in bins."""
MAX_XTC_THRESHOLD = 0.5
"""Above it, at most one token can be a top choice."""
BINS_PER_NAT, N_BINS = 32, 1024


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Return the `k` candidates with the largest logits, sorted, without those whose logit is minus infinity.

    There may be no candidates. Source: llama_sampler_top_k.
    """
    if not candidates.is_sorted and k < len(candidates) > SORT_LIMIT:
        candidates = candidates.take(top_k_superset(candidates.logits, k)[0])
    if k >= len(candidates) > SORT_LIMIT:
        return candidates.without_masked()
    chosen = candidates.sorted().head(k)
    if len(chosen) and chosen.logits[-1] == -np.inf:
        chosen = chosen.head(int(np.count_nonzero(chosen.logits != -np.inf)))
    return chosen


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Return the candidates whose logit is at most `n` standard deviations below the largest.

    Source: Tang et al., Top-n-sigma (arXiv:2411.07641); llama_sampler_top_n_sigma.
    """
    bound = candidates.max_logit - n * candidates.logits.std(dtype=np.float64)
    return candidates.take(np.flatnonzero(candidates.logits >= np.float32(bound)))


def top_p_min_p(candidates: Candidates, p: float, min_p: float, min_keep: int) -> Candidates:
    """Return the candidates that top-p keeps, and of these the candidates that min-p keeps.

    Top-p keeps the smallest set of the most probable candidates whose total probability is at least `p`. Min-p keeps
    the candidates with p_i >= min_p * max(p), which is equivalent to logit_i >= max(logit) + ln(min_p). Each filter
    keeps the first candidates in descending order of probability. So if there are many candidates, min-p may come
    first: it leaves fewer candidates to sort.

    Sources: Holtzman et al., The Curious Case of Neural Text Degeneration (arXiv:1904.09751), llama_sampler_top_p;
    Nguyen et al., Min-p Sampling (arXiv:2407.01082), llama_sampler_min_p.

    Args:
        candidates: The candidates.
        p: The probability for top-p; 1 keeps all.
        min_p: The factor for min-p; 0 keeps all.
        min_keep: Number of candidates that are kept in any case.
    """
    if len(candidates) <= SORT_LIMIT:
        candidates = candidates.sorted()
    if not candidates.is_sorted:
        kept = _top_p_min_p_of_many(candidates, p, min_p)
        return kept if len(kept) >= min_keep else top_k(candidates, min_keep)
    weights = candidates.weights()
    n_kept = len(weights)
    if min_p > 0:
        n_kept -= int(weights[::-1].searchsorted(min_p))
    if p < 1:
        reached = weights.cumsum(dtype=np.float64)
        n_kept = min(n_kept, int(reached.searchsorted(p * reached[-1])) + 1)
    return candidates.head(max(n_kept, min_keep))


def _top_p_min_p_of_many(candidates: Candidates, p: float, min_p: float) -> Candidates:
    max_logit, weights = candidates.max_logit, candidates.weights() if p < 1 else candidates.logits
    mass = p * float(weights.sum(dtype=np.float64))
    if min_p > 0:
        kept = np.flatnonzero(candidates.logits >= max_logit + np.float32(log(min_p)))
        candidates, weights = candidates.take(kept), weights[kept]
    if p == 1:
        return candidates
    return candidates.take(_nearest_with_mass(max_logit - candidates.logits, weights, mass))


def typical_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Return the smallest set of the most typical candidates whose total probability is above `p`.

    The most typical candidate i has the smallest |-ln(p_i) - H|, where H = -sum(p_i ln(p_i)) is the entropy in nats.
    Source: Meister et al., Locally Typical Sampling (arXiv:2202.00666); llama_sampler_typical.
    """
    probabilities = candidates.probabilities()
    surprise = -np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    distance = np.abs(surprise - probabilities @ surprise)
    # llama.cpp requires sum > p here, but sum >= p for top-p. sum > p is the same as sum >= the next float after p.
    kept = _nearest_with_mass(distance, probabilities, np.nextafter(p, 2))
    if len(kept) < min_keep:
        kept = np.sort(np.argsort(distance, kind="stable")[:min_keep])
    return candidates.take(kept)


def exclude_top_choices(candidates: Candidates, threshold: float, min_keep: int) -> Candidates:
    """Drop the candidates with at least the probability `threshold`, except the least probable of them.

    Source: llama_sampler_xtc. The caller decides by chance whether the filter is applied.
    """
    weights = candidates.weights()
    tops = np.flatnonzero(weights >= threshold * weights.sum(dtype=np.float64))
    n_dropped = len(tops) - 1
    if threshold > MAX_XTC_THRESHOLD or n_dropped < 1 or len(candidates) - n_dropped < min_keep:
        return candidates
    last = tops[np.argsort(candidates.logits[tops], kind="stable")[0]]
    kept = np.ones(len(candidates), np.bool_)
    kept[tops] = False
    kept[last] = True
    return candidates.take(np.flatnonzero(kept))


def dynamic_temperature(candidates: Candidates, temperature: float, spread: float, exponent: float) -> float:
    """Return the temperature for these candidates: low + (high - low) * (H / ln(n)) ** exponent.

    H is the entropy of the candidates in nats, n their number, low and high are `temperature` minus (at least 0) and
    plus `spread`. Source: llama_sampler_temp_ext.
    """
    low, high = max(0.0, temperature - spread), temperature + spread
    if len(candidates) < 2:
        return high
    probabilities = candidates.probabilities()
    present = probabilities[probabilities > 0]
    entropy = max(0.0, -float(present @ np.log(present)))
    normalized = entropy / log(len(candidates))
    return low + (high - low) * float(normalized**exponent)


def _nearest_with_mass(distance: npt.NDArray[np.floating], weights: npt.NDArray[np.floating], mass: float) -> Indices:
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
