"""The bytes of all tokens of a vocabulary, in one object.

A `bytes` object for each of 151,936 tokens takes 15 MB, because each has a header of 33 bytes and an entry in a list or
a dictionary. One `bytes` object for all tokens, with an array of offsets, takes 1.5 MB.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Self, overload


class TokenPieces(Sequence[bytes]):
    """The bytes of each token, by its id. Immutable, so it is thread-safe.

    Args:
        pieces: The bytes of each token, in the order of the ids. For a control token: its text, such as `<|im_end|>`.
        hidden: The tokens that have no text in an output, such as control tokens.
    """

    def __init__(self, pieces: Iterable[bytes], hidden: Iterable[int] = ()) -> None:
        joined, starts = bytearray(), array("I", [0])
        for piece in pieces:
            joined += piece
            starts.append(len(joined))
        self._joined = bytes(joined)
        self._starts = starts
        self.hidden = frozenset(hidden)

    @classmethod
    def from_bytes(cls, data: bytes, hidden: Iterable[int] = ()) -> Self:
        """Return the pieces from the bytes that `to_bytes` returned on the same machine."""
        pieces = cls((), hidden)
        end = 4 + int.from_bytes(data[:4], "big")
        pieces._starts = array("I", data[4:end])
        pieces._joined = data[end:]
        return pieces

    def to_bytes(self) -> bytes:
        """Return all pieces as bytes, in the byte order of this machine."""
        starts = self._starts.tobytes()
        return len(starts).to_bytes(4, "big") + starts + self._joined

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, token: int) -> bytes: ...
    @overload
    def __getitem__(self, token: slice) -> list[bytes]: ...
    def __getitem__(self, token: int | slice) -> bytes | list[bytes]:
        """Return the bytes of a token, even of a hidden one.

        Raises:
            ValueError: The token is not in the vocabulary.
        """
        if isinstance(token, slice):
            return [self[one] for one in range(*token.indices(len(self)))]
        if not 0 <= token < len(self):
            raise self._unknown(token)
        return self._joined[self._starts[token] : self._starts[token + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return (self._joined[start:end] for start, end in pairwise(self._starts))

    def in_output(self, token: int) -> bytes:
        """Return the bytes of a token as an output has them: none for a hidden token.

        Raises:
            ValueError: The token is not in the vocabulary.
        """
        if token in self.hidden:
            return b""
        starts = self._starts
        if not 0 <= token < len(starts) - 1:
            raise self._unknown(token)
        return self._joined[starts[token] : starts[token + 1]]

    def tokens_with(self, text: bytes, *, at_end: bool = False) -> Iterator[int]:
        """Yield the tokens whose bytes contain the text, or end with it. A token can be yielded several times.

        Args:
            text: The bytes to find, at least one.
            at_end: Whether only the tokens that end with the text are yielded.
        """
        position = self._joined.find(text)
        while position >= 0:
            token = bisect_right(self._starts, position) - 1
            end = self._starts[token + 1]
            if position + len(text) <= end and (not at_end or position + len(text) == end):
                yield token
            position = self._joined.find(text, position + 1)

    def _unknown(self, token: int) -> ValueError:
        return ValueError(f"token {token} is not in the vocabulary of {len(self)} tokens")

    def __repr__(self) -> str:
        return f"<TokenPieces {len(self)} tokens, {len(self._joined)} bytes>"
