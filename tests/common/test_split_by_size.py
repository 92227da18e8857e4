"""A sequence is split into parts of limited size."""

from __future__ import annotations

from llamaq.common.split_by_size import split_by_size


def test_a_part_has_at_most_the_allowed_items_and_bytes() -> None:
    texts = ["aa", "b", "cccccc", "", "d", "e", "f", "g"]
    parts = split_by_size(texts, len, max_items=3, max_bytes=4)
    assert list(parts) == [["aa", "b"], ["cccccc"], ["", "d", "e"], ["f", "g"]], "a large item is a part of its own"
    assert list(split_by_size([], len, max_items=3, max_bytes=4)) == []
