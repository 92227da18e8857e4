"""Vocabularies with a given chat template, and the special tokens in a list of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llamaq.common.protocol.chat import Message
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.common.vocab.special_token_masking import SpecialTokenFinder
from llamaq.tools.random_gguf import PLAIN, write_model
from llamaq.worker.engine.gguf_vocab import extract_vocab


def chat(*contents: str) -> list[Message]:
    """Return a chat of messages of the user."""
    return [Message(role="user", content=content) for content in contents]


def special_texts_of(vocab: Vocab, tokens: list[int]) -> list[str]:
    """Return the texts of the control tokens."""
    return [vocab.token_text(token) for token in tokens if not vocab.piece(token)]


def template_vocab(tmp_path: Path, template: str | None) -> Vocab:
    spec = replace(PLAIN, chat_template=template)
    return Vocab.from_blob(extract_vocab(write_model(tmp_path / "template.gguf", spec)))


FINDER = SpecialTokenFinder(["<s>", "<sep>", "[X]"])
"""Finds three special texts. One of them begins as another one does."""
