"""Turns texts into the tokens of a vocabulary of llama.cpp, and tokens into text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import llama_cpp

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.answer_tags import ANSWER_TAGS
from llamaq.common.vocab.split_long_text import split_text
from llamaq.common.vocab.token_table import TokenTable

TAG_ATTRIBUTES = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
C_WHITE_SPACE = " \t\n\v\f\r"
"""What llama.cpp removes next to some special tokens."""
_WORD = re.compile(r"[^ \t\n\r]+")


class TextTokenizer(TokenTable):
    """The tokens of one vocabulary, and the conversion of texts to them and back. Thread-safe.

    Args:
        vocab: Pointer to a llama_vocab.
    """

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of a text. Where it contains the text of a special token, the result contains this token.

        BOS is added if the model's metadata ask for it, unless the text starts with it.

        Args:
            text: The text.
            max_tokens: A text is refused without tokenizing it if its length proves that it has more tokens than this.
                All other texts are tokenized, even if the result has more tokens.

        Raises:
            JobRejected: The text is too long, or llama.cpp cannot tokenize it.
        """
        self.check_length(text, max_tokens)
        bos = self._text_or_empty(self.bos)
        return self._tokenize(text, add_special=not (bos and text.startswith(bos)), parse_special=True)

    def encode_whole(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of a whole text, between the special tokens that the model asks for, such as CLS and SEP.

        Embedding models get their texts in this form. Where the text contains the text of a special token, the result
        contains this token.

        Args:
            text: The text.
            max_tokens: As in `encode`.

        Raises:
            JobRejected: As in `encode`.
        """
        self.check_length(text, max_tokens)
        frame = self._tokenize_part("", add_special=True, parse_special=False)
        n_before = 1 if self.bos is not None and frame[:1] == [self.bos] else 0
        return [*frame[:n_before], *self.encode_part(text, parse_special=True), *frame[n_before:]]

    def encode_part(self, text: str, *, parse_special: bool = False, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of a part of a longer text: no special token is added.

        Args:
            text: The text.
            parse_special: Whether the texts of special tokens become these tokens. Otherwise they stay text.
            max_tokens: As in `encode`.

        Raises:
            JobRejected: As in `encode`.
        """
        self.check_length(text, max_tokens)
        return self._tokenize(text, add_special=False, parse_special=parse_special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, as a job streams it. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode(errors="replace")

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Raise `JobRejected` if the length of the text proves that it has more than `max_tokens` tokens.

        WordPiece and Unigram remove white space, and one unknown token may stand for any number of characters. So the
        number of characters proves nothing for them. But each word has at least one token of WordPiece.
        """
        if max_tokens is None or len(text) <= max_tokens * self._max_token_bytes:
            return
        if self.kind == llama_cpp.LLAMA_VOCAB_TYPE_UGM:
            return
        if self.kind == llama_cpp.LLAMA_VOCAB_TYPE_WPM and _count_words(text) <= max_tokens:
            return
        message = f"{len(text)} characters are too large: they have more than {max_tokens} tokens"
        raise JobRejected(ErrorCode.PROMPT_TOO_LONG, message)

    def strip_at_special_tokens(self, before: str, text: str, after: str) -> str:
        """Return a text without the white space that the special tokens before and after it remove, as in phi-3."""
        if before and self._attributes_of(before) & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP:
            text = text.lstrip(C_WHITE_SPACE)
        if after and self._attributes_of(after) & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP:
            text = text.rstrip(C_WHITE_SPACE)
        return text

    @cached_property
    def tag_tokens(self) -> dict[str, int]:
        """The tags of reasoning and tool calls that are a control token or a user-defined token, with the token."""
        found = {tag: self._tokenize_part(tag, add_special=False, parse_special=True) for tag in ANSWER_TAGS}
        return {tag: tokens[0] for tag, tokens in found.items() if len(tokens) == 1 and self._is_tag(tokens[0])}

    def _is_tag(self, token: int) -> bool:
        """Return whether a token is a control token or a user-defined token. Other tokens are parts of any text."""
        return bool(llama_cpp.llama_vocab_get_attr(self._vocab, token) & TAG_ATTRIBUTES)

    def _attributes_of(self, special: str) -> int:
        """Return the attributes of the token that a special text becomes, a union of `LLAMA_TOKEN_ATTR_…`."""
        tokens = self._tokenize_part(special, add_special=False, parse_special=True)
        return int(llama_cpp.llama_vocab_get_attr(self._vocab, tokens[0])) if len(tokens) == 1 else 0

    def _tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        specials = self.special_tokens.find(text) if parse_special else []
        tokens: list[int] = []
        for index, part in enumerate(
            split_text(text, specials, splits_runs=self.kind == llama_cpp.LLAMA_VOCAB_TYPE_BPE)
        ):
            tokens += self._tokenize_part(part, add_special and index == 0, parse_special)
            if add_special and index == 0 and self.adds_eos:
                tokens.pop()  # the model must continue the text, so remove the EOS that llama.cpp added
        return tokens

    def _tokenize_part(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode(errors="replace")
        n_max = len(data) + 8  # every token has at least one byte; llama.cpp adds at most a few special tokens
        buffer = (llama_cpp.llama_token * n_max)()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, n_max, add_special, parse_special)
        if n < 0:
            raise JobRejected(ErrorCode.PROMPT_TOO_LONG, f"llama.cpp cannot tokenize {len(data)} bytes of text")
        tokens: list[int] = buffer[:n]
        return tokens

    @cached_property
    def _max_token_bytes(self) -> int:
        """Length in bytes of the longest token text: an upper bound on the characters that one token encodes."""
        return max(len(llama_cpp.llama_vocab_get_text(self._vocab, token)) for token in range(self.n_tokens))


def _count_words(text: str) -> int:
    """Return the number of words that have a letter or digit. WordPiece may remove other words, such as control codes.

    Only white space that each tokenizer takes for white space ends a word.
    """
    return sum(any(map(str.isalnum, word)) for word in _WORD.findall(text))
