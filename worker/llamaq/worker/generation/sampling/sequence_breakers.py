"""The sequence breakers of DRY: texts at which a repetition ends, as the tokens of a vocabulary."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Protocol

MAX_TEXT_BYTES = 40
"""Longer breakers are cut to this length, as in llama.cpp."""
MAX_TAIL_TOKENS = 20
CACHED_BREAKERS = 256

Tail = tuple[int, ...]


class Vocabulary(Protocol):
    """The part of a vocabulary that is needed here."""

    n_tokens: int

    def piece_with_special(self, token: int) -> bytes:
        """Return the bytes of one token, also of a control token."""

    def encode_part(self, text: str) -> list[int]:
        """Return the tokens of a text that is a part of a longer text."""


class SequenceBreakers:
    """Sequences of tokens at which repetitions end: a head, and the tokens that must follow it.

    Args:
        sequences: Pairs of a head and its tail. An empty tail: the head alone is a breaker.
    """

    def __init__(self, sequences: Iterable[tuple[int, Tail]] = ()) -> None:
        self._tails: dict[int, set[Tail]] = {}
        for head, tail in sequences:
            self._tails.setdefault(head, set()).add(tail)
        self.max_tail = max((len(tail) for tails in self._tails.values() for tail in tails), default=0)
        """Length of the longest tail in tokens."""

    @cached_property
    def singles(self) -> frozenset[int]:
        """The tokens that alone are a breaker."""
        return frozenset(head for head, tails in self._tails.items() if () in tails)

    def tail_before(self, history: Sequence[int], end: int) -> int | None:
        """Return the tail of the breaker that ends before position `end`, as a number of tokens.

        If several breakers end there, the tail is that of the breaker with the shortest tail. None: no breaker ends
        there.
        """
        for length in range(min(self.max_tail + 1, end)):
            tails = self._tails.get(history[end - 1 - length])
            if tails is not None and tuple(history[end - length : end]) in tails:
                return length
        return None

    def __repr__(self) -> str:
        return f"<SequenceBreakers {len(self._tails)} heads>"


class BreakerFinder:
    """Finds the tokens that contain or begin a text, as llama.cpp does for DRY. Thread-safe.

    Source: get_overlapping_token_sequences in src/llama-sampler.cpp.

    Args:
        vocab: The model's vocabulary.
    """

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._of_text = lru_cache(maxsize=CACHED_BREAKERS)(self._find)

    def breakers(self, texts: Iterable[str]) -> SequenceBreakers:
        """Return the breakers for these texts."""
        return SequenceBreakers(sequence for text in texts for sequence in self._of_text(text))

    def _find(self, text: str) -> tuple[tuple[int, Tail], ...]:
        """Return the heads and tails of one text.

        A token that contains the text is a breaker. A token that ends with the beginning of the text is a breaker if
        the tokens of the rest of the text follow it.
        """
        text = text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
        if not text:
            return ()
        containing = set(self._tokens_with(text.encode()))
        found: list[tuple[int, Tail]] = [(token, ()) for token in containing]
        for n_chars in range(1, len(text)):
            tail = tuple(self._vocab.encode_part(text[n_chars:])[:MAX_TAIL_TOKENS])
            ending = set(self._tokens_with(text[:n_chars].encode(), at_end=True))
            found += [(token, tail) for token in ending - containing]
        return tuple(found)

    def _tokens_with(self, text: bytes, *, at_end: bool = False) -> Iterator[int]:
        """Yield the tokens that contain the text, or end with it."""
        joined, starts = self._joined
        position = joined.find(text)
        while position >= 0:
            token = bisect_right(starts, position) - 1
            end = starts[token + 1] - 1
            if position + len(text) <= end and (not at_end or position + len(text) == end):
                yield token
            position = joined.find(text, position + 1)

    @cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        """The texts of all tokens, with a zero byte after each, and where they start. A search in them is fast."""
        pieces = [self._vocab.piece_with_special(token) for token in range(self._vocab.n_tokens)]
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece) + 1)
        return b"".join(piece + b"\0" for piece in pieces), starts

    def __repr__(self) -> str:
        return f"<BreakerFinder {self._vocab.n_tokens} tokens>"
