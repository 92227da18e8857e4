"""The sequence breakers of DRY: texts at which a repetition ends, as the tokens of a vocabulary."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np

from llamaq.common.vocab.token_pieces import TokenPieces

MAX_TEXT_BYTES = 40
"""Longer breakers are cut to this length, as in llama.cpp."""
MAX_TAIL_TOKENS = 20
CACHED_BREAKERS = 64
"""Number of texts whose tokens are cached. A letter is in half of all tokens, which then take 0.3 MB."""

Tail: TypeAlias = tuple[int, ...]
Heads: TypeAlias = "array[int]"


class Vocabulary(Protocol):
    """The part of a vocabulary that is needed here."""

    n_tokens: int

    @property
    def pieces(self) -> TokenPieces:
        """The bytes of all tokens, control tokens included."""

    def encode_part(self, text: str) -> list[int]:
        """Return the tokens of a text that is a part of a longer text."""


class SequenceBreakers:
    """Sequences of tokens at which repetitions end: a head, and the tokens that must follow it.

    Args:
        heads: Pairs of a tail and the heads that it follows, in ascending order. An empty tail: each of the heads alone
            is a breaker.
        n_tokens: Size of the vocabulary.
    """

    def __init__(self, heads: Iterable[tuple[Tail, Heads]] = (), n_tokens: int = 0) -> None:
        self._heads: dict[Tail, list[Heads]] = {}
        is_head = np.zeros(n_tokens, np.uint8)
        for tail, tokens in heads:
            self._heads.setdefault(tail, []).append(tokens)
            is_head[np.frombuffer(tokens, np.int32)] = 1
        self._is_head = is_head.tobytes()
        """For each token, whether it is a head of any tail."""
        self.max_tail = max(map(len, self._heads), default=0)
        """Length of the longest tail in tokens."""

    def is_single(self, token: int) -> bool:
        """Return whether this token alone is a breaker."""
        return self._begins(token, ())

    def tail_before(self, history: Sequence[int], end: int) -> int | None:
        """Return the tail of the breaker that ends before position `end`, as a number of tokens.

        If several breakers end there, the tail is that of the breaker with the shortest tail. None: no breaker ends
        there.
        """
        if not self._heads:
            return None
        for length in range(min(self.max_tail + 1, end)):
            head = history[end - 1 - length]
            if self._is_head[head] and self._begins(head, tuple(history[end - length : end])):
                return length
        return None

    def _begins(self, head: int, tail: Tail) -> bool:
        """Return whether this head with this tail is a breaker."""
        for heads in self._heads.get(tail, ()):
            index = bisect_left(heads, head)
            if index < len(heads) and heads[index] == head:
                return True
        return False

    def __repr__(self) -> str:
        return f"<SequenceBreakers {len(self._heads)} tails>"


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
        return SequenceBreakers((one for text in texts for one in self._of_text(text)), self._vocab.n_tokens)

    def _find(self, text: str) -> tuple[tuple[Tail, Heads], ...]:
        """Return the tails of one text, each with its heads.

        A token that contains the text is a breaker. A token that ends with the beginning of the text is a breaker if
        the tokens of the rest of the text follow it.
        """
        text = text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
        if not text:
            return ()
        containing = set(self._vocab.pieces.tokens_with(text.encode()))
        found: list[tuple[Tail, Heads]] = [((), _heads(containing))]
        for n_chars in range(1, len(text)):
            tail = tuple(self._vocab.encode_part(text[n_chars:])[:MAX_TAIL_TOKENS])
            ending = set(self._vocab.pieces.tokens_with(text[:n_chars].encode(), at_end=True))
            found.append((tail, _heads(ending - containing)))
        return tuple((tail, heads) for tail, heads in found if heads)

    def __repr__(self) -> str:
        return f"<BreakerFinder {self._vocab.n_tokens} tokens>"


def _heads(tokens: Iterable[int]) -> Heads:
    return array("i", sorted(tokens))
