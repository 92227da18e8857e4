"""Packed tokens are compared in whole tokens, and no token is truncated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaq.worker.core.packed_tokens import common_prefix, pack

# Only a few different tokens, so that random strings share long prefixes. The encodings of some tokens have the same
# bytes at different positions. So a comparison that begins inside a token finds matches that do not exist.
TOKEN = st.sampled_from([0, 1, 256, 257, 65537, -1, 2**31 - 1, -(2**31)])
TOKENS = st.lists(TOKEN, max_size=7)


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix, compared token by token."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@given(TOKENS, TOKENS, TOKENS)
@settings(max_examples=150, deadline=None)
def test_a_common_prefix_is_counted_in_whole_tokens(start: list[int], one: list[int], other: list[int]) -> None:
    a, b = start + one, start + other
    assert common_prefix(pack(a), pack(b)) == common_prefix(pack(b), pack(a)) == n_common(a, b)


@pytest.mark.parametrize("at", [0, 1, 63, 64, 4095, 7998, 7999])
def test_the_first_different_token_of_long_prefixes_is_found(at: int) -> None:
    tokens = list(range(8000))
    other = tokens.copy()
    other[at] += 1 << 24
    assert common_prefix(pack(tokens), pack(other)) == at
    assert common_prefix(pack(tokens), pack(tokens[:at])) == at


def test_a_packed_token_has_four_bytes_and_a_larger_number_is_refused() -> None:
    assert (len(pack([1, -1, 151_935])), pack([])) == (12, b"")
    with pytest.raises(OverflowError):
        pack([2**31])
