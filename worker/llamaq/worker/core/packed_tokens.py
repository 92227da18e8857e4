"""Packed tokens: each token is a 32-bit integer, so that one memcmp compares two long prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize


def pack(tokens: Sequence[int]) -> bytes:
    """Return the tokens as native 32-bit integers.

    Raises:
        OverflowError: A token does not fit into 32 bits.
    """
    return array("i", tokens).tobytes()


def common_prefix(a: bytes, b: bytes) -> int:
    """Return the length, in tokens, of the common prefix of two packed strings."""
    return agreeing_bytes(a, b, 0) // TOKEN_BYTES


def agreeing_bytes(edge: bytes, tokens: bytes, offset: int) -> int:
    """Return the length of the common prefix of `edge` and `tokens[offset:]`, in bytes. Only whole tokens count.

    The compared length doubles until the strings differ, because most prompts differ early. A binary search then finds
    the exact length. No step compares bytes that an earlier step has found equal. The steps compare memory views, so no
    bytes are copied.
    """
    view = memoryview(edge)
    low, high, step = 0, min(len(edge), len(tokens) - offset) // TOKEN_BYTES + 1, 1
    while high - low > 1:  # invariant: the first `low` tokens are equal, the first `high` are not
        middle = low + step if low + step < high else (low + high) // 2
        start = low * TOKEN_BYTES
        if tokens.startswith(view[start : middle * TOKEN_BYTES], offset + start):
            low, step = middle, 2 * step
        else:
            high = middle
    return low * TOKEN_BYTES
