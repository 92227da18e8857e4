"""The sampler `infill` for completions within code: it keeps the few tokens that are sure, and ends the text otherwise.

An editor shows a completion before its user has asked for it, so a short and probable one is better than a long one. It
stands after top-k and top-p. Source: llama_sampler_infill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from llamaq.worker.generation.sampling.candidates import Candidates

MAX_COMPARED = 100
"""Largest number of candidates whose texts are compared, the most probable first. llama.cpp compares all. Each of the
others has a probability below 0.01, and without top-k there can be thousands, of which each is compared with each."""
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


def infill(candidates: Candidates, tokens: InfillTokens, position: int) -> Candidates:
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
    """
    candidates = candidates.sorted()
    chances: list[float] = candidates.probabilities().tolist()
    is_end = [candidates.token_at(index) in tokens.end_tokens for index in range(len(chances))]
    end_chance = sum([chance for chance, ends in zip(chances, is_end, strict=True) if ends])
    if END_FACTOR * end_chance * len(chances) > 1 - end_chance:
        return candidates.take(np.flatnonzero(is_end))
    chances = _combined(
        chances[:MAX_COMPARED],
        [tokens.piece(candidates.token_at(index)) for index in range(min(len(chances), MAX_COMPARED))],
    )
    kept = [i for i, chance in enumerate(chances) if chance >= LEAST_PROBABILITY or (is_end[i] and chance > 0)]
    n_text = sum([not is_end[index] for index in kept])
    if not n_text:
        return _end(candidates, is_end, tokens, position)
    least = sum([chances[index] for index in kept]) / (n_text + 1)
    return candidates.take(np.array([index for index in kept if chances[index] >= least or is_end[index]]))


def _combined(chances: Sequence[float], pieces: Sequence[bytes]) -> list[float]:
    """Return the probabilities after those of tokens of which one begins with the other were added.

    The less probable token of two gets the probability 0.
    """
    combined = list(chances)
    for first, beginning in enumerate(pieces[: len(combined)]):
        for second, piece in enumerate(pieces[: len(combined)]):
            if not combined[first] or not beginning:
                break
            if second != first and combined[second] and piece.startswith(beginning):
                more, less = (second, first) if combined[second] > combined[first] else (first, second)
                combined[more] += combined[less]
                combined[less] = 0.0
    return combined


def _end(candidates: Candidates, is_end: Sequence[bool], tokens: InfillTokens, position: int) -> Candidates:
    """Return the token that ends the text, or the most probable other one if the job may not end now."""
    if tokens.end is not None and position >= tokens.min_tokens:
        return Candidates.only(tokens.end)
    best = next((index for index, ends in enumerate(is_end) if not ends), 0)
    return candidates.take(np.array([best]))
