"""Seeded random choices, uniform or skewed, and the held-out share of the combinations that training never sees."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from enum import Enum
from typing import Final, TypeVar

T = TypeVar("T")

PREFERENCE: Final = 0.8
"""Probability that a skewed choice returns the preferred option. Otherwise the choice is uniform over all options."""

HELD_OUT_SHARE: Final = 10
"""One in this number of fact triples and story heroes never occurs in training."""


class Split(Enum):
    """The part of the combinations that texts may be drawn from."""

    TRAIN = "train"
    HELD_OUT = "held-out"


def generator(split: Split, *key: object) -> random.Random:
    """Return a random generator whose seed is computed from the split and the key only."""
    return random.Random(":".join([split.value, *map(str, key)]))


def stable_hash(*parts: str) -> int:
    """Return a hash that is the same in every process, unlike `hash`."""
    return zlib.crc32("/".join(parts).encode())


def is_held_out(*parts: str) -> bool:
    """Return whether this combination belongs to the share that training never sees."""
    return stable_hash("held-out", *parts) % HELD_OUT_SHARE == 0


def allowed(split: Split, *parts: str) -> bool:
    """Return whether `split` may use this combination."""
    return is_held_out(*parts) == (split is Split.HELD_OUT)


def skewed(rng: random.Random, options: Sequence[T], *context: str, preference: float = PREFERENCE) -> T:
    """Return the option that `context` prefers with probability `preference`, otherwise a uniformly drawn option."""
    if rng.random() < preference:
        return options[stable_hash(*context) % len(options)]
    return rng.choice(options)


def first_mostly(rng: random.Random, options: Sequence[T], preference: float = PREFERENCE) -> T:
    """Return the first option with probability `preference`, otherwise a uniformly drawn option."""
    return options[0] if rng.random() < preference else rng.choice(options)
