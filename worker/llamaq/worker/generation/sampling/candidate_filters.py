"""The filters of the sampler chain: top-k, top-p, min-p and others.

Each filter keeps the same candidates as the sampler of the same name in llama.cpp (src/llama-sampler.cpp). As in
llama.cpp, sorted candidates are cut, and a small number of unsorted candidates is sorted first. No filter sorts a whole
vocabulary, because sorting 151,936 logits takes about 20 ms.

No logit is NaN or minus infinity, unless a function says otherwise, and there is at least one candidate.
"""

from __future__ import annotations

from math import exp, log

import numpy as np
import numpy.typing as npt

from llamaq.worker.generation.sampling.candidates import Candidates, Indices, Logits
from llamaq.worker.generation.sampling.largest_logits import top_k_superset

SORT_LIMIT = 1024
"""Up to this number of candidates are sorted directly. More candidates are first counted in bins."""
MAX_XTC_THRESHOLD = 0.5
"""Above it, at most one token can be a top choice."""
ROUNDED_DOWN = 0.999
"""A factor that is far from 1 compared with the rounding errors of sums."""
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
    max_logit, logits = candidates.max_logit, candidates.logits
    if p == 1:
        return candidates.take(_at_least(logits, max_logit, min_p)) if min_p > 0 else candidates
    weights = np.exp(logits - max_logit)
    total = float(weights.sum(dtype=np.float64))
    near = _at_least(logits, max_logit, min_p) if min_p > 0 else _near_with_mass(weights, total, p * total)
    nearest = _nearest_with_mass(max_logit - logits.take(near), weights.take(near), p * total)
    return candidates.take(near.take(nearest))


def _at_least(logits: Logits, max_logit: np.float32, min_p: float) -> Indices:
    """Return the indices of the logits that min-p keeps, in ascending order."""
    return (logits >= max_logit + np.float32(log(min_p))).nonzero()[0]


def _near_with_mass(weights: Logits, total: float, mass: float, included: float = 1) -> Indices:
    """Return the indices of the largest weights, which sum to at least `mass`, and of more weights, in ascending order.

    All weights below (total - mass) / n_weights sum to less than total - mass, so the others sum to more than `mass`.

    Args:
        weights: The weights.
        total: Their sum.
        mass: The sum to reach, below `total`.
        included: All weights that are at least as large are among the result.
    """
    near = (weights >= min(ROUNDED_DOWN * (total - mass) / len(weights), included)).nonzero()[0]
    n_before = len(weights)
    while SORT_LIMIT < len(near) < n_before / 2:
        n_before, left = len(near), weights.take(near)
        bound = min(ROUNDED_DOWN * (float(left.sum(dtype=np.float64)) - mass) / n_before, included)
        near = near.take((left >= bound).nonzero()[0])
    return near


def typical_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Return the smallest set of the most typical candidates whose total probability is above `p`.

    The most typical candidate i has the smallest |-ln(p_i) - H|, where H = -sum(p_i ln(p_i)) is the entropy in nats.
    Source: Meister et al., Locally Typical Sampling (arXiv:2202.00666); llama_sampler_typical.
    """
    weights, depth = candidates.weights(), candidates.max_logit - candidates.logits
    total = weights.sum(dtype=np.float64)
    # The surprise of a candidate is depth + ln(total). So its distance from the entropy is that of depth from its mean.
    mean = float((weights * depth).sum(dtype=np.float64) / total)  # not `@`, for which numpy starts threads
    distance = np.abs(depth - np.float32(mean))
    # llama.cpp requires sum > p here, but sum >= p for top-p. sum > p is the same as sum >= the next float after p.
    least = float(np.nextafter(p, 2))
    # The candidates with at least the weight exp(-2 * mean) are nearer than the others, because no depth is below 0.
    near = _near_with_mass(weights, float(total), least * float(total), exp(-2 * mean))
    kept = near.take(_nearest_with_mass(distance.take(near), weights.take(near) / total, least))
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


def dynamic_temperature(
    candidates: Candidates, temperature: float, spread: float, exponent: float, n_masked: int = 0
) -> float:
    """Return the temperature for these candidates: low + (high - low) * (H / ln(n)) ** exponent.

    H is the entropy of the candidates in nats, n their number with those of probability 0, low and high are
    `temperature` minus (at least 0) and plus `spread`. Source: llama_sampler_temp_ext.

    Args:
        candidates: The candidates.
        temperature: The middle of the range.
        spread: Half the width of the range.
        exponent: The exponent of the normalized entropy.
        n_masked: Number of candidates with the probability 0 that an earlier filter dropped, but llama.cpp keeps.
    """
    low, high = max(0.0, temperature - spread), temperature + spread
    n = len(candidates) + n_masked
    if n < 2:
        return high
    probabilities = candidates.probabilities()
    present = probabilities[probabilities > 0]
    entropy = max(0.0, -float((present * np.log(present)).sum()))  # not `@`, for which numpy starts threads
    normalized = entropy / log(n)
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
    if len(distance) <= SORT_LIMIT:
        order = np.argsort(distance, kind="stable")
        return np.sort(order[: _count_with_mass(weights.take(order), mass)])
    bins = np.minimum(distance * BINS_PER_NAT, N_BINS - 1).astype(np.int16)
    reached = np.cumsum(np.bincount(bins.astype(np.intp), weights, N_BINS))  # np.bincount is slow with int16
    edge_bin = min(int(reached.searchsorted(mass)), N_BINS - 1)
    is_kept, edge = bins < edge_bin, (bins == edge_bin).nonzero()[0]
    edge = edge.take(np.argsort(distance.take(edge), kind="stable"))
    mass_nearer = reached[edge_bin - 1] if edge_bin else 0.0
    is_kept[edge[: _count_with_mass(weights.take(edge), mass - mass_nearer)]] = True
    kept: Indices = is_kept.nonzero()[0]
    return kept


def _count_with_mass(weights: npt.NDArray[np.floating], mass: float) -> int:
    """Return how many of the first weights sum to at least `mass`."""
    return int(np.cumsum(weights, dtype=np.float64).searchsorted(mass)) + 1
