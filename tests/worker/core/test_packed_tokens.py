"""Packed tokens are compared in whole tokens, and no token is truncated."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.support.token_lists import TOKENS, n_common

from llamaq.worker.core.packed_tokens import common_prefix, pack


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
