"""The sampler `infill` for completions within code: it keeps the few tokens that are sure, and ends the text otherwise.

An editor shows a completion before its user has asked for it, so a short and probable one is better than a long one. It
stands after top-k and top-p. Source: llama_sampler_infill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from llamaq.worker.generation.sampling.candidate_filters import top_k
from llamaq.worker.generation.sampling.candidates import Candidates, Indices

MAX_COMPARED = 100
"""Largest number of candidates, the most probable first, that can be left. llama.cpp compares each candidate with each
other one, and without top-k there can be thousands. Each of those has a probability below 0.01."""
END_FACTOR = 3.0
LEAST_PROBABILITY = 0.2


class InfillTokens(NamedTuple):
    """What the sampler needs to know about the tokens of a model and of a job."""

    piece: Callable[[int], bytes]
    """Returns the bytes of a token, which are empty for a control token."""
    end_tokens: frozenset[int]
    """The tokens that end the job."""
    end: int | None
    """The token that is drawn if no other one is probable enough. None: this job cannot end so."""
    min_tokens: int
    """The first tokens of the job, of which none may end it."""


def infill(candidates: Candidates, tokens: InfillTokens, position: int, n_masked: int = 0) -> Candidates:
    """Return the candidates that are probable enough, or a token that ends the text.

    - Only the end tokens are left if their probability, times three and times the number of candidates, is larger than
      that of the others.
    - Two tokens of which one is the beginning of the other count as one, the more probable of them, with both
      probabilities.
    - A token is then dropped if its probability is below 0.2. If no token is left, the text ends.
    - Of the n tokens that are left, those are dropped whose share is below 1 / (n + 1).

    End tokens are not dropped in the last two steps.

    Args:
        candidates: The candidates, none of which is masked.
        tokens: What is known about the tokens.
        position: The number of tokens that the job has generated.
        n_masked: Number of candidates with the probability 0 that an earlier filter dropped, but llama.cpp keeps.
    """
    weights = candidates.weights()
    total = float(weights.sum(dtype=np.float64))
    ends = _indices_of(tokens.end_tokens, candidates)
    end_chance = float(weights.take(ends).sum(dtype=np.float64)) / total
    if END_FACTOR * end_chance * (len(candidates) + n_masked) > 1 - end_chance:
        return candidates.take(ends)
    likely = top_k(candidates, MAX_COMPARED)
    ids = [likely.token_at(index) for index in range(len(likely))]
    is_end = [token in tokens.end_tokens for token in ids]
    chances = _combined((likely.weights() / total).tolist(), list(map(tokens.piece, ids)))
    kept = [i for i, chance in enumerate(chances) if chance >= LEAST_PROBABILITY or (chance and is_end[i])]
    n_text = sum([not is_end[index] for index in kept])
    if not n_text:
        return _end(likely, is_end, tokens, position)
    least = sum([chances[index] for index in kept]) / (n_text + 1)
    return likely.take(np.array([index for index in kept if chances[index] >= least or is_end[index]]))


def _indices_of(tokens: frozenset[int], candidates: Candidates) -> Indices:
    """Return the indices of those of these tokens that are candidates, in ascending order."""
    wanted = np.array(sorted(tokens), np.intp)
    if candidates.tokens is None:
        return wanted
    return np.flatnonzero(np.isin(candidates.tokens, wanted))


def _combined(chances: list[float], pieces: Sequence[bytes]) -> list[float]:
    """Return the probabilities after those of tokens of which one begins with the other were added.

    The less probable token of two gets the probability 0.
    """
    for first, beginning in enumerate(pieces):
        for second, piece in enumerate(pieces):
            if not chances[first] or not beginning:
                break
            if second != first and chances[second] and piece.startswith(beginning):
                more, less = (second, first) if chances[second] > chances[first] else (first, second)
                chances[more] += chances[less]
                chances[less] = 0.0
    return chances


def _end(likely: Candidates, is_end: Sequence[bool], tokens: InfillTokens, position: int) -> Candidates:
    """Return the token that ends the text, or the most probable other one if the job may not end now."""
    if tokens.end is not None and position >= tokens.min_tokens:
        return Candidates.only(tokens.end)
    best = next((index for index, ends in enumerate(is_end) if not ends), 0)
    return likely.take(np.array([best]))
