"""Chooses how many tokens of each draft a tick verifies, so that the tick yields most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_GAIN = 1.2
"""Drafts must promise this many times the tokens per second of a tick without drafts. The predictions have errors, and
the work that tokens cause on other threads is not part of the tick that yields them."""


class Candidate(NamedTuple):
    """The draft of a slot."""

    n_tokens: int
    probability: float
    """Probability that a token of the draft is accepted if those before it were."""


def choose_lengths(
    drafts: Sequence[Candidate], n_decode: int, plain_s: float, draft_token_s: float, room: int
) -> list[int]:
    """Return for each draft how many of its tokens to verify, 0 for a draft that promises no gain.

    Token j of a draft becomes a token of the output with probability p ** j. The most probable tokens of all drafts
    come first, and are taken as long as a token raises the expected number of tokens per second.

    Args:
        drafts: The drafts.
        n_decode: Number of decode tokens of the tick, those of slots without a draft included.
        plain_s: Time of a tick without drafts, in seconds.
        draft_token_s: Time of a further token, in seconds.
        room: Largest number of draft tokens in the tick.
    """
    tokens = sorted(
        (
            (draft.probability**place, -index)
            for index, draft in enumerate(drafts)
            for place in range(1, draft.n_tokens + 1)
        ),
        reverse=True,
    )
    lengths = [0] * len(drafts)
    expected, tick_s = float(n_decode), plain_s
    for probability, index in tokens[: max(0, room)]:
        if probability * tick_s < expected * draft_token_s:
            break
        expected += probability
        tick_s += draft_token_s
        lengths[-index] += 1
    return lengths if expected * plain_s >= LEAST_GAIN * n_decode * tick_s else [0] * len(drafts)


def can_gain(n_decode: int, plain_s: float, draft_token_s: float) -> bool:
    """Return whether drafts that are certainly accepted can gain enough."""
    return LEAST_GAIN * n_decode * draft_token_s <= plain_s
