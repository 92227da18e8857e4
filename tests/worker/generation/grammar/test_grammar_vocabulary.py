"""The part of a vocabulary that the process of grammars gets."""

from __future__ import annotations

from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.grammar_vocabulary import CopiedVocabulary, pack_vocabulary


def test_the_process_gets_the_part_of_the_vocabulary_that_grammars_need(tag_vocab: Vocab) -> None:
    copied = CopiedVocabulary.unpack(pack_vocabulary(tag_vocab))
    assert list(copied.pieces) == list(tag_vocab.pieces)
    assert copied.pieces.hidden == tag_vocab.pieces.hidden
    names = ("end_tokens", "eos", "bos")
    assert [getattr(copied, name) for name in names] == [getattr(tag_vocab, name) for name in names]
