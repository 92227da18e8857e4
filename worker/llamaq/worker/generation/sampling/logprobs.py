"""The probabilities of a drawn token and of its alternatives: those of the model, or those of the draw."""

from __future__ import annotations

from math import log

import numpy as np
import numpy.typing as npt

from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.worker.generation.sampling.candidates import Candidates
from llamaq.worker.generation.sampling.largest_logits import top_k_superset

LOWEST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot have. OpenAI's API has the same number."""


def token_logprobs(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Return ln(p_i), where p = softmax(logits), for a token and for the most probable tokens.

    The logits are those of the model: bias, penalties, grammar, temperature and filters do not change them.

    Args:
        logits: One value for each token of the vocabulary, shape (n_vocab,).
        token: The drawn token.
        n_top: Number of most probable tokens. The drawn token need not be one of them.
    """
    found, largest = top_k_superset(logits, max(1, n_top))
    weights = logits - np.float32(largest)
    np.exp(weights, out=weights)  # in place, because the memory of another array of this size takes as long as `exp`
    log_total = largest + log(weights.sum())  # numpy adds in pairs: the error is far below that of the logits
    best = found[np.argsort(-logits[found], kind="stable")][:n_top]
    top = tuple((int(index), _rounded(float(logits[index]) - log_total)) for index in best)
    return TokenLogprobs(_rounded(float(logits[token]) - log_total), top)


def drawn_logprobs(candidates: Candidates, index: int, n_top: int) -> TokenLogprobs:
    """Return ln(p_i) in a draw, for the drawn token and for the most probable candidates.

    Args:
        candidates: The candidates of the draw, after the sampler chain. Other tokens have the probability 0.
        index: Index of the drawn candidate.
        n_top: Largest number of most probable candidates.
    """
    probabilities = candidates.probabilities()
    best = [each for each in (-probabilities).argsort(kind="stable")[:n_top].tolist() if probabilities[each] > 0]
    top = tuple((candidates.token_at(each), _rounded(float(np.log(probabilities[each])))) for each in best)
    return TokenLogprobs(_rounded(float(np.log(probabilities[index]))), top)


def _rounded(value: float) -> float:
    """Return the value as a finite number with five decimals, about the precision of the logits."""
    return round(max(value, LOWEST), 5)
