"""A set of tokens of a vocabulary, such as those that a grammar allows next, with one bit for each token.

The time to mask logits does not depend on the pattern of the bits. `numpy.copyto` takes up to 20 times as long with a
random mask as with one of long runs, because the processor cannot predict its branches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import numpy as np
import numpy.typing as npt

WORD_BITS = 64
SMALL_SHARE = 1 / 8
"""A set with at most this share of the vocabulary is small."""
NUMPY_COUNTS_BITS = hasattr(np, "bitwise_count")
"""Whether numpy is version 2 or newer, which counts bits five times as fast as an integer of Python."""


def _bounds_of_bytes() -> npt.NDArray[np.float32]:
    """Return the largest logit for each bit of a byte, shape (256, 8): infinity for 1, minus infinity for 0."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32(np.inf), np.float32(-np.inf))


_BOUNDS = _bounds_of_bytes()


class TokenSet:
    """A set of tokens. It does not change, so threads may share it.

    Args:
        bits: One bit for each token, in ascending order, the lowest bit of each byte first. Bits after the last token
            are ignored.
        n_vocab: Number of tokens of the vocabulary.
    """

    __slots__ = ("_bytes", "_ids", "_n_tokens", "_octets", "n_vocab")

    def __init__(self, bits: bytes, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        words = bytearray(-(-n_vocab // WORD_BITS) * (WORD_BITS // 8))
        n_bytes = -(-n_vocab // 8)
        words[:n_bytes] = bits[:n_bytes]
        if n_vocab % 8:
            words[n_bytes - 1] &= (1 << n_vocab % 8) - 1
        self._bytes = bytes(words)
        self._octets = np.frombuffer(self._bytes, np.uint8)
        self._n_tokens: int | None = None
        self._ids: npt.NDArray[np.intp] | None = None

    @classmethod
    def empty(cls, n_vocab: int) -> Self:
        """Return a set without tokens."""
        return cls(bytes(-(-n_vocab // 8)), n_vocab)

    @classmethod
    def of(cls, tokens: Iterable[int], n_vocab: int) -> Self:
        """Return the set of these tokens, which are in the vocabulary."""
        is_in = np.zeros(n_vocab, np.uint8)
        is_in[np.fromiter(tokens, np.intp)] = 1
        return cls(np.packbits(is_in, bitorder="little").tobytes(), n_vocab)

    def __and__(self, other: TokenSet) -> TokenSet:
        """Return the tokens that are in both sets, which belong to the same vocabulary."""
        return TokenSet((self._octets & other._octets).tobytes(), self.n_vocab)

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.n_vocab and bool(self._bytes[token >> 3] >> (token & 7) & 1)

    def __len__(self) -> int:
        if self._n_tokens is None:
            if NUMPY_COUNTS_BITS:
                self._n_tokens = int(np.bitwise_count(self._octets.view(np.uint64)).sum())
            else:
                self._n_tokens = int.from_bytes(self._bytes, "little").bit_count()
        return self._n_tokens

    @property
    def is_small(self) -> bool:
        """Whether reading the logits of the set takes less time than masking all other logits."""
        return len(self) <= SMALL_SHARE * self.n_vocab

    def only(self) -> int | None:
        """Return the token of a set with one token. None: there is none, or several."""
        return int(self.ids()[0]) if len(self) == 1 else None

    def ids(self) -> npt.NDArray[np.intp]:
        """Return the tokens in ascending order, read-only. They are computed once, and take 8 bytes for each token."""
        if self._ids is None:
            used = (self._octets != 0).nonzero()[0]
            bits = np.unpackbits(self._octets.take(used), bitorder="little")
            found = bits.view(np.bool_).nonzero()[0]  # numpy finds true values of bool faster than other numbers
            ids = used.take(found >> 3) * 8 + (found & 7)
            ids.setflags(write=False)
            self._ids = ids
        return self._ids

    def contained(self, tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Return for each of these tokens, which are in the vocabulary, whether it is in the set."""
        octets = self._octets.take(tokens >> 3)
        return (octets >> (tokens & 7).astype(np.uint8) & 1).view(np.bool_)

    def mask_others(self, logits: npt.NDArray[np.float32]) -> None:
        """Set the logits of all tokens that are not in the set to minus infinity, in place. NaN stays NaN.

        Args:
            logits: The logits of the whole vocabulary, shape (n_vocab,).
        """
        bounds = _BOUNDS.take(self._octets, axis=0).ravel()[: self.n_vocab]
        np.minimum(logits, bounds, out=logits)

    def __repr__(self) -> str:
        return f"<TokenSet {len(self)} of {self.n_vocab}>"
