"""The probabilities of the tokens that a job generated."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """The probability of a generated token and of its alternatives, as natural logarithms."""

    logprob: float
    """Logarithm of the probability of the generated token."""
    top: tuple[tuple[int, float], ...]
    """Id and logarithm of the most probable tokens at this position, the most probable one first."""
