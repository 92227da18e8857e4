"""What a vocabulary knows of its tokens: end tokens, suppressed tokens, and the bytes of each token."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from llamaq.common.vocab import token_table
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.engine.gguf_vocab import extract_vocab


def test_every_end_token_is_known_and_has_no_text(chat_vocab: Vocab) -> None:
    assert {chat_vocab.token_text(token) for token in chat_vocab.end_tokens} == {"<|endoftext|>", "<|im_end|>"}
    assert all(chat_vocab.piece(token) == b"" for token in chat_vocab.end_tokens)


def test_a_control_token_has_its_text_on_request_only(chat_vocab: Vocab) -> None:
    end = min(chat_vocab.end_tokens)
    assert chat_vocab.piece(end) == b""
    assert chat_vocab.piece_with_special(end) == chat_vocab.token_text(end).encode()
    letter = chat_vocab.encode("a")[-1]
    assert chat_vocab.piece_with_special(letter) == chat_vocab.piece(letter) == b"a"


def test_the_tokens_that_a_file_suppresses_are_known(chat_model: Path) -> None:
    blob = bytearray(extract_vocab(chat_model))
    assert Vocab.from_blob(bytes(blob)).suppressed_tokens == frozenset()
    key, array, int32 = b"tokenizer.ggml.suppress_tokens", 9, 5
    blob += struct.pack("<Q", len(key)) + key + struct.pack("<IIQ2i", array, int32, 2, 7, 30)
    struct.pack_into("<Q", blob, 16, struct.unpack_from("<Q", blob, 16)[0] + 1)  # the number of keys
    assert Vocab.from_blob(bytes(blob)).suppressed_tokens == {7, 30}


@pytest.mark.parametrize("token", [-1, 2**31])
def test_a_token_outside_the_vocabulary_has_no_piece(vocab: Vocab, token: int) -> None:
    with pytest.raises(ValueError, match="not in the vocabulary"):
        vocab.piece(token)


def test_a_vocabulary_has_the_same_pieces_with_and_without_the_table(chat_model: Path) -> None:
    vocab = Vocab.from_blob(extract_vocab(chat_model))
    read = [(vocab.piece(token), vocab.piece_with_special(token)) for token in range(vocab.n_tokens)]
    vocab._cached_pieces.clear()
    assert read == [(vocab.pieces.in_output(token), vocab.pieces[token]) for token in range(vocab.n_tokens)]
    assert read == [(vocab.piece(token), vocab.piece_with_special(token)) for token in range(vocab.n_tokens)]
    assert vocab.pieces is vocab.pieces


def test_a_vocabulary_caches_a_bounded_number_of_pieces(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_table, "MAX_CACHED_PIECES", 10)
    vocab._cached_pieces.clear()  # other tests have used this vocabulary
    texts = [vocab.piece(token) for token in range(vocab.n_tokens)]
    assert 1 <= len(vocab._cached_pieces) <= 10
    assert texts == [vocab.pieces.in_output(token) for token in range(vocab.n_tokens)]
