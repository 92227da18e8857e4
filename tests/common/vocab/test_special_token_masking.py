"""The finder of special texts, in texts and at their ends."""

from __future__ import annotations

from tests.support.vocabularies import FINDER

from llamaq.common.vocab.special_token_masking import Span, SpecialTokenFinder


def test_special_texts_are_found_from_left_to_right_and_the_longest_first() -> None:
    assert FINDER.find("a<s><sep>[X<s>") == [Span(1, 4), Span(4, 9), Span(11, 14)]
    assert SpecialTokenFinder([]).find("<s>") == []


def test_parts_of_special_texts_are_found_at_both_ends_of_a_text() -> None:
    assert FINDER.find_at_edges(" ep> and <se") == [Span(1, 4), Span(9, 12)]
    assert FINDER.find_at_edges("X") == [Span(0, 1)]
    assert FINDER.find_at_edges("nothing here") == []
    assert FINDER.find_at_edges("  ") == []
