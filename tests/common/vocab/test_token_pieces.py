from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaq.common.vocab.token_pieces import TokenPieces

PIECES = [b"", b"the", b" th", b"", b"e t", b"\xe4\xb9", b"<|end|>", b"the"]


def test_a_token_has_its_bytes_and_a_hidden_token_has_none_in_the_output() -> None:
    pieces = TokenPieces(PIECES, hidden=[6])
    assert list(pieces) == pieces[:] == [pieces[token] for token in range(len(pieces))] == PIECES
    assert [pieces.in_output(token) for token in (1, 6)] == [b"the", b""]


def test_a_table_can_be_sent_to_another_process() -> None:
    copied = TokenPieces.from_bytes(TokenPieces(PIECES).to_bytes(), hidden=[6])
    assert list(copied) == PIECES
    assert copied.hidden == {6}


@pytest.mark.parametrize("token", [-1, len(PIECES), 2**40])
def test_a_token_outside_the_vocabulary_has_no_bytes(token: int) -> None:
    pieces = TokenPieces(PIECES)
    for read in (pieces.__getitem__, pieces.in_output):
        with pytest.raises(ValueError, match="not in the vocabulary of 8 tokens"):
            read(token)


@given(
    pieces=st.lists(st.text("ab", max_size=4).map(str.encode), max_size=12),
    text=st.text("ab", min_size=1, max_size=3).map(str.encode),
)
def test_only_tokens_that_contain_the_whole_text_are_found(pieces: list[bytes], text: bytes) -> None:
    table = TokenPieces(pieces)
    assert set(table.tokens_with(text)) == {token for token, piece in enumerate(pieces) if text in piece}
    ending = {token for token, piece in enumerate(pieces) if piece.endswith(text)}
    assert set(table.tokens_with(text, at_end=True)) == ending


def test_a_table_takes_five_bytes_for_a_token_besides_its_text() -> None:
    pieces = TokenPieces(str(token).encode() for token in range(10_000))
    n_bytes = sum(map(sys.getsizeof, vars(pieces).values()))
    assert n_bytes < len(b"".join(pieces)) + 5 * len(pieces)
