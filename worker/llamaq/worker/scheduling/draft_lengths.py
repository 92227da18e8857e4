"""Chooses how many tokens of each draft a tick verifies, so that the tick yields most tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST_GAIN = 1.03
"""Drafts must promise this many times the tokens per second of a tick without drafts: the predictions have errors."""
LEAST_PROBABILITY = 0.02
"""A draft ends before the first token that is accepted with a smaller probability."""


class Candidate(NamedTuple):
    """The draft of a slot."""

    n_tokens: int
    probability: float
    """Probability that a token of the draft is accepted if those before it were."""


def choose_lengths(drafts: Sequence[Candidate], n_decode: int, seconds: Callable[[int], float], room: int) -> list[int]:
    """Return for each draft how many of its tokens to verify, 0 for a draft that promises no gain.

    Token j of a draft becomes a token of the output with probability p ** j. The most probable tokens of all drafts
    come first, and those are taken that give most tokens per second.

    Args:
        drafts: The drafts.
        n_decode: Number of decode tokens of the tick, those of slots without a draft included.
        seconds: Predicts the time of a tick from its number of tokens.
        room: Largest number of draft tokens in the tick.
    """
    tokens = sorted(
        ((draft.probability**place, index) for index, draft in enumerate(drafts) for place in _places(draft)),
        reverse=True,
    )[: max(0, room)]
    expected, n_chosen = float(n_decode), 0
    least_s = seconds(n_decode)
    best_rate = LEAST_GAIN * expected / least_s if least_s else 0.0
    for n_drafted, (probability, _) in enumerate(tokens, start=1):
        expected += probability
        tick_s = max(seconds(n_decode + n_drafted), least_s)
        rate = expected / tick_s if tick_s else expected
        if rate > best_rate:
            best_rate, n_chosen = rate, n_drafted
    lengths = [0] * len(drafts)
    for _, index in tokens[:n_chosen]:
        lengths[index] += 1
    return lengths


def _places(draft: Candidate) -> list[int]:
    """Return the places, from 1 on, of the tokens that are probable enough."""
    places = []
    probability = draft.probability
    for place in range(1, draft.n_tokens + 1):
        if probability < LEAST_PROBABILITY:
            break
        places.append(place)
        probability *= draft.probability
    return places
