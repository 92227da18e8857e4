"""Chooses how long the drafts of a tick are, so that the tick yields the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamaq.worker.scheduling.tokens_ahead.ahead_times import AheadTimes

LEAST_GAIN = 1.2
"""Drafts must promise this many times the tokens per second of a tick without drafts. The predictions have errors, and
the work that tokens cause on other threads is not part of the tick that yields them."""


class DraftOption(NamedTuple):
    """A draft that a tick may verify."""

    n_tokens: int
    probability: float
    """Probability that a token of the draft is accepted if those before it were."""


class _Choice(NamedTuple):
    """Lengths of drafts, and the tick with these drafts."""

    lengths: list[int]
    expected: float
    """Expected number of tokens of the tick."""
    tick_s: float


def choose_lengths(
    drafts: Sequence[DraftOption], n_decode: int, plain_s: float, times: AheadTimes, room: int, step_s: float = 0.0
) -> list[int]:
    """Return for each draft how many of its tokens to verify, 0 for a draft that promises no gain.

    Token j of a draft becomes a token of the output with probability p ** j. The most probable tokens of all drafts
    come first, and as many of them are taken as promise the largest number of tokens per second. With a draft model,
    the drafts also take a step for each place. All drafts share it, so the number of places is chosen first.

    Args:
        drafts: The drafts.
        n_decode: Number of decode tokens of the tick, those of slots without a draft included.
        plain_s: Time of a tick without drafts, in seconds.
        times: Times of the draft tokens.
        room: Largest number of draft tokens in the tick.
        step_s: Time in which the draft model finds the next token of every draft, in seconds.
    """
    longest = max((draft.n_tokens for draft in drafts), default=0)
    numbers = range(1, longest + 1) if step_s else (longest,)
    best: _Choice | None = None
    for n_places in numbers:
        choice = _choose_within(n_places, drafts, n_decode, plain_s + n_places * step_s, times, room)
        if best is not None and choice.expected * best.tick_s <= best.expected * choice.tick_s:
            break
        best = choice
    if best is None or best.expected * plain_s < LEAST_GAIN * n_decode * best.tick_s:
        return [0] * len(drafts)
    return best.lengths


def _choose_within(
    n_places: int, drafts: Sequence[DraftOption], n_decode: int, tick_s: float, times: AheadTimes, room: int
) -> _Choice:
    """Return the best lengths that are at most `n_places`. `tick_s` is the time of the tick without verification."""
    tokens = sorted(
        (
            (draft.probability**place, -index)
            for index, draft in enumerate(drafts)
            for place in range(1, min(draft.n_tokens, n_places) + 1)
        ),
        reverse=True,
    )
    del tokens[max(0, room) :]
    expected = float(n_decode)
    n_best, best_expected, best_s = 0, expected, tick_s
    for n_tokens, (probability, _) in enumerate(tokens, start=1):
        expected += probability
        seconds = tick_s + times.seconds(n_tokens)
        if expected * best_s >= best_expected * seconds:
            n_best, best_expected, best_s = n_tokens, expected, seconds
    lengths = [0] * len(drafts)
    for _, index in tokens[:n_best]:
        lengths[-index] += 1
    return _Choice(lengths, best_expected, best_s)


def can_gain(
    n_decode: int, plain_s: float, draft_token_s: float, step_s: float = 0.0, probability: float = 1.0
) -> bool:
    """Return whether drafts can gain enough if each of their tokens is accepted with at most this probability.

    `draft_token_s` is the shortest time of a draft token.
    """
    return LEAST_GAIN * (n_decode * draft_token_s + step_s) <= probability * plain_s
