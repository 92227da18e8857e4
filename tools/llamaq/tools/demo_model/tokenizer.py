"""Byte-level BPE like that of GPT-2. It can tokenize any text. Each word of the word lists is one token."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llamaq.tools.demo_model.corpus import tokenizer_texts
from llamaq.tools.demo_model.document import SPECIALS

VOCABULARY_SIZE: Final = 2048
SAMPLE_DOCUMENTS: Final = 4000


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer of exactly `VOCABULARY_SIZE` entries. The special tokens are the first entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(f"the texts give only {tokenizer.get_vocab_size()} entries, not {VOCABULARY_SIZE}")
    return tokenizer


def load_or_train(path: Path, seed: int) -> Tokenizer:
    """Return the tokenizer in the file `path`. If there is no file, train a tokenizer and save it there."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(tokenizer_texts(SAMPLE_DOCUMENTS, seed))
    tokenizer.save(str(path))
    return tokenizer
