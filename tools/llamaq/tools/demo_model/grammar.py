"""What all generators share: weighted segments, documents, seeded and skewed choice, and the held-out share."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

T = TypeVar("T")

PREFERENCE: Final = 0.8
"""Probability of the preferred option of a skewed choice; the rest is uniform over all options."""

HELD_OUT_SHARE: Final = 10
"""One in so many fact triples and story heroes never occurs in training."""

BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
SYSTEM: Final = "<|system|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
END: Final = "<|end|>"
PAD: Final = "<|pad|>"
SPECIALS: Final = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)


class Split(Enum):
    """Which share of the combinations a generator may draw from."""

    TRAIN = "train"
    HELD_OUT = "held-out"


class Role(Enum):
    """How much the loss of a segment counts: `value` is the weight of each of its tokens."""

    GIVEN = 0.15
    """Drawn at random, so not to be predicted: facts, questions, a user's turn."""
    TEXT = 1.0
    """Story text and small talk."""
    ANSWER = 5.0
    """Recalled from the context."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text and its role. A segment starts at a word boundary, so segments can be tokenized one by one."""

    text: str
    role: Role


@dataclass(frozen=True, slots=True)
class Document:
    """One training text, `<|bos|>` first."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The whole text, special tokens included."""
        return "".join(segment.text for segment in self.segments)


def generator(split: Split, *key: object) -> random.Random:
    """A random generator that depends on nothing but the split and the key."""
    return random.Random(":".join([split.value, *map(str, key)]))


def stable_hash(*parts: str) -> int:
    """The same number in every process, unlike `hash`."""
    return zlib.crc32("/".join(parts).encode())


def is_held_out(*parts: str) -> bool:
    """Whether this combination belongs to the share that training never sees."""
    return stable_hash("held-out", *parts) % HELD_OUT_SHARE == 0


def allowed(split: Split, *parts: str) -> bool:
    """Whether `split` may use this combination."""
    return is_held_out(*parts) == (split is Split.HELD_OUT)


def skewed(rng: random.Random, options: Sequence[T], *context: str, preference: float = PREFERENCE) -> T:
    """The option that `context` prefers, with probability `preference`; else any of them."""
    if rng.random() < preference:
        return options[stable_hash(*context) % len(options)]
    return rng.choice(options)


def first_mostly(rng: random.Random, options: Sequence[T], preference: float = PREFERENCE) -> T:
    """The first option with probability `preference`, else any of them."""
    return options[0] if rng.random() < preference else rng.choice(options)
