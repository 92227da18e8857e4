"""Packed tokens: 4 bytes each, so that one memcmp compares long prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize


def pack(tokens: Sequence[int]) -> bytes:
    """The tokens as native 32-bit integers; `OverflowError` when one does not fit."""
    return array("i", tokens).tobytes()


def common_prefix(a: bytes, b: bytes) -> int:
    """How many tokens two packed strings have in common at their beginnings."""
    return agreeing_bytes(a, b, 0) // TOKEN_BYTES


def agreeing_bytes(edge: bytes, tokens: bytes, at: int) -> int:
    """Bytes of whole tokens, from the beginning of `edge`, that `tokens` has at `at`.

    In steps that double until one goes too far, for most prompts part soon, and by halves from there. Only what is
    still in doubt is compared, by memcmp on views: no byte is copied.
    """
    view = memoryview(edge)
    low, high, step = 0, min(len(edge), len(tokens) - at) // TOKEN_BYTES + 1, 1
    while high - low > 1:  # the first `low` tokens agree, and not all of the first `high`
        middle = low + step if low + step < high else (low + high) // 2
        start = low * TOKEN_BYTES
        if tokens.startswith(view[start : middle * TOKEN_BYTES], at + start):
            low, step = middle, 2 * step
        else:
            high = middle
    return low * TOKEN_BYTES
