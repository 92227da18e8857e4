"""Texts become tokens and tokens become texts; texts that are certainly too long are refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given
from hypothesis import strategies as st
from tests.support.vocabularies import special_texts_of

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.tools.random_gguf.bert_model import write_bert
from llamaq.worker.engine.gguf_vocab import extract_vocab


@given(text=st.text(max_size=60))
def test_decoding_the_tokens_of_a_text_returns_the_text(vocab: Vocab, text: str) -> None:
    tokens = vocab.encode(text)
    assert tokens[0] == vocab.bos
    if not vocab.special_tokens.find(text):
        assert vocab.decode(tokens) == text
        assert b"".join(map(vocab.piece, tokens)) == text.encode()


def test_bos_is_added_once_even_if_the_text_starts_with_it(vocab: Vocab) -> None:
    assert vocab.encode("Once") == vocab.encode("<|bos|>Once")
    assert vocab.encode("Once").count(1) == 1


def test_special_tokens_in_a_text_prompt_are_parsed(vocab: Vocab) -> None:
    tokens = vocab.encode("<|user|>hi<|end|>")
    assert special_texts_of(vocab, tokens) == ["<|bos|>", "<|user|>", "<|end|>"]


def test_a_text_with_a_lone_surrogate_is_encoded(vocab: Vocab) -> None:
    assert vocab.decode(vocab.encode("a\ud800b")) == "a?b"


def test_the_tags_that_are_tokens_are_known(vocab: Vocab, chat_vocab: Vocab, tag_vocab: Vocab) -> None:
    tags = ["[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    assert set(tag_vocab.tag_tokens) == set(tags)
    assert [tag_vocab.encode_part(tag, parse_special=True) for tag in tags] == [
        [tag_vocab.tag_tokens[tag]] for tag in tags
    ]
    assert list(vocab.tag_tokens) == ["<|end|>"]
    assert chat_vocab.tag_tokens == {}


def test_a_text_that_is_certainly_too_long_is_refused_before_it_is_tokenized(vocab: Vocab) -> None:
    with pytest.raises(JobRejected) as refused:
        vocab.encode("a " * 100_000, max_tokens=100)
    assert refused.value.code == ErrorCode.PROMPT_TOO_LONG
    assert len(vocab.encode("a " * 300, max_tokens=100)) > 100


@pytest.fixture(scope="module")
def bert_vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    return Vocab.from_blob(extract_vocab(write_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")))


def unigram_vocab(path: Path) -> Vocab:
    """Return a vocabulary of Unigram, as T5 has it."""
    pieces = ["\u2581", "\u2581a", "a", "b"]
    with closing(GGUFWriter(path, "llama")) as writer:
        writer.add_tokenizer_model("t5")
        writer.add_token_list(["<pad>", "</s>", "<unk>", *pieces])
        writer.add_token_scores([0.0] * (3 + len(pieces)))
        types = [TokenType.CONTROL, TokenType.CONTROL, TokenType.UNKNOWN, *[TokenType.NORMAL] * len(pieces)]
        writer.add_token_types(list(map(int, types)))
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(2)
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
    return Vocab.from_blob(path.read_bytes())


LONG_TEXTS_OF_FEW_TOKENS = ["a" + " " * 5000 + "b", "a" + "\n" * 5000 + "b", "\u2603" * 5000]


@pytest.mark.parametrize("text", LONG_TEXTS_OF_FEW_TOKENS)
def test_a_long_text_of_few_tokens_is_not_refused(tmp_path: Path, bert_vocab: Vocab, text: str) -> None:
    for vocab in (bert_vocab, unigram_vocab(tmp_path / "unigram.gguf")):
        n_tokens = len(vocab.encode_whole(text))
        assert n_tokens <= 4
        assert len(vocab.encode_whole(text, max_tokens=n_tokens)) == n_tokens


@given(text=st.lists(st.text(max_size=3), max_size=30).map(" ".join))
def test_no_text_is_refused_that_has_few_tokens(bert_vocab: Vocab, text: str) -> None:
    tokens = bert_vocab.encode_part(text)
    assert bert_vocab.encode_part(text, max_tokens=len(tokens)) == tokens


def test_a_text_of_more_words_than_tokens_is_refused_before_it_is_tokenized(bert_vocab: Vocab) -> None:
    with pytest.raises(JobRejected, match="20000 characters are too large"):
        bert_vocab.encode_whole("a\n" * 10_000, max_tokens=64)
