"""The part of a vocabulary that grammars need, and its copy in the process that tries grammars.

The copy does not need llama.cpp. So this process loads neither llama.cpp nor the vocabulary of the model's file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol, Self

from llamaq.common.vocab.token_pieces import TokenPieces


class GrammarVocabulary(Protocol):
    """The part of `Vocab` that grammars need."""

    @property
    def pieces(self) -> TokenPieces:
        """The bytes of all tokens, control tokens included."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """All tokens that end a generation."""

    @property
    def eos(self) -> int | None:
        """The token that a model generates at the end of a text."""

    @property
    def bos(self) -> int | None:
        """The token that a prompt begins with."""


@dataclass(frozen=True, slots=True)
class CopiedVocabulary:
    """A copy of this part in another process; implements `GrammarVocabulary`."""

    pieces: TokenPieces
    end_tokens: frozenset[int]
    eos: int | None
    bos: int | None

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the copy from the bytes that `pack_vocabulary` returned."""
        end = 4 + int.from_bytes(data[:4], "big")
        header = json.loads(data[4:end])
        pieces = TokenPieces.from_bytes(data[end:], header["hidden"])
        return cls(pieces, frozenset(header["end_tokens"]), header["eos"], header["bos"])


def pack_vocabulary(vocab: GrammarVocabulary) -> bytes:
    """Return the bytes from which `CopiedVocabulary.unpack` makes a copy, on the same machine."""
    lists = {"hidden": sorted(vocab.pieces.hidden), "end_tokens": sorted(vocab.end_tokens)}
    header = json.dumps({**lists, "eos": vocab.eos, "bos": vocab.bos}).encode()
    return len(header).to_bytes(4, "big") + header + vocab.pieces.to_bytes()
