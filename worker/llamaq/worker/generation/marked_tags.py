"""The bytes of tokens in which a tag, such as `<think>`, differs from other tokens that spell the same text."""

from __future__ import annotations

from llamaq.common.vocab.llama_vocab import Vocab

MARK = b"\xff"
"""The byte before a tag that is one token. No text in UTF-8 contains it."""


class MarkedTags:
    """Marks the tags of a vocabulary in the bytes of its tokens.

    Args:
        vocab: The model's vocabulary.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._tags = frozenset(vocab.tag_tokens.values())

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token. Those of a tag begin with `MARK`."""
        piece = self._vocab.piece_with_special(token)
        return MARK + piece if token in self._tags else piece

    def pieces(self, text: str) -> bytes:
        """Return the bytes of the tokens in which a model writes this text, in the form of `piece`."""
        data = text.encode()
        for tag in map(str.encode, self._vocab.tag_tokens):
            data = data.replace(tag, MARK + tag)
        return data
