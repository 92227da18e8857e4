"""Training documents: segments of text with loss weights, and the special tokens of the model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

BOS: Final = "<|bos|>"
EOS: Final = "<|endoftext|>"  # llama.cpp knows this name; for other names it logs a warning at each start
SYSTEM: Final = "<|system|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
END: Final = "<|end|>"
PAD: Final = "<|pad|>"
SPECIALS: Final = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)


class Role(Enum):
    """The role of a segment. The value is the loss weight of each token of the segment."""

    GIVEN = 0.15
    """Text that is drawn at random and cannot be predicted: facts, questions, a user's turn."""
    TEXT = 1.0
    """Story text and small talk."""
    ANSWER = 5.0
    """Words that are recalled from the context."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text and its role. A segment starts at a word boundary, so each segment can be tokenized alone."""

    text: str
    role: Role


@dataclass(frozen=True, slots=True)
class Document:
    """One training text. It begins with `<|bos|>`."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The whole text, special tokens included."""
        return "".join(segment.text for segment in self.segments)
