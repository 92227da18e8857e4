"""The tokens of a vocabulary of llama.cpp: which of them have a purpose, and the text and the bytes of each."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llama_cpp

from llamaq.common.vocab.special_token_masking import SpecialTokenFinder
from llamaq.common.vocab.token_pieces import TokenPieces

PIECE_BYTES = 256
"""Initial size of the buffer for the bytes of a token. Few tokens are longer."""
MAX_CACHED_PIECES = 16_384
"""Number of tokens whose bytes are cached, in 2 MB. Most texts consist of fewer different tokens."""
SPECIAL_ATTRIBUTES = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
"""llama.cpp matches the texts of these tokens only with `parse_special`. The texts of user-defined tokens (<think> of
Qwen, runs of newlines of Gemma) are ordinary text: llama.cpp always makes one token of them."""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The special tokens of a prompt with a gap (fill in the middle, FIM)."""

    prefix: int
    """Stands before the text before the gap."""
    suffix: int
    """Stands before the text after the gap."""
    middle: int
    """The end of the prompt. The model continues with what belongs into the gap."""
    repository: int | None
    """Stands before the name of a repository."""
    file: int | None
    """Stands before the name of each file."""


class TokenTable:
    """The tokens of one vocabulary. Thread-safe.

    Args:
        vocab: Pointer to a llama_vocab.
    """

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self._cached_pieces: dict[int, bytes] = {}
        self._pieces: TokenPieces | None = None
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self.bos = _token_or_none(llama_cpp.llama_vocab_bos(vocab))
        self.eos = _token_or_none(llama_cpp.llama_vocab_eos(vocab))
        self.adds_eos: bool = self.eos is not None and llama_cpp.llama_vocab_get_add_eos(vocab)
        self.kind: int = llama_cpp.llama_vocab_type(vocab)
        """The type of the tokenizer, a `LLAMA_VOCAB_TYPE_…` of llama.cpp."""
        self.adds_bos: bool = self.bos is not None and llama_cpp.llama_vocab_get_add_bos(vocab)
        self.separators = self._read_separators()
        """The special tokens that follow the query, and those that follow the document, in a prompt for reranking."""

    @property
    def pointer(self) -> Any:
        """Pointer to the llama_vocab, for calls of llama.cpp."""
        return self._vocab

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token, b"" for a control token. A character may need the bytes of several tokens.

        Raises:
            ValueError: The token is not in the vocabulary.
        """
        piece = self._cached_pieces.get(token)
        if piece is None:
            piece = self._cache_piece(token)
        return piece

    def piece_with_special(self, token: int) -> bytes:
        """Return the bytes of one token, as `piece` does. For a control token, return its text, such as
        `<|tool_call|>`.
        """
        return self.piece(token) or self._read_piece(token, special=True)

    @property
    def pieces(self) -> TokenPieces:
        """The bytes of all tokens, control tokens included. The first access reads all tokens."""
        if self._pieces is None:
            self._pieces = self._read_pieces()
        return self._pieces

    def token_text(self, token: int) -> str:
        """Return the text of a token as the vocabulary has it, which is not the text that it stands for."""
        text: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")

    @cached_property
    def suppressed_tokens(self) -> frozenset[int]:
        """The tokens that the model's file says are never generated: `tokenizer.ggml.suppress_tokens`."""
        n_tokens = ctypes.c_int32()
        tokens: Any = llama_cpp.llama_vocab_get_suppress_tokens(self._vocab, ctypes.byref(n_tokens))
        return frozenset(tokens[: n_tokens.value] if n_tokens.value else ())

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """All tokens that end a generation."""
        return frozenset(token for token in range(self.n_tokens) if llama_cpp.llama_vocab_is_eog(self._vocab, token))

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token that ends an answer: EOT, or EOS if the model has no EOT. None: it has neither."""
        turn = _token_or_none(llama_cpp.llama_vocab_eot(self._vocab))
        return self.eos if turn is None else turn

    @cached_property
    def special_tokens(self) -> SpecialTokenFinder:
        """The finder of the texts that llama.cpp turns into special tokens with `parse_special`."""
        return SpecialTokenFinder(
            self.token_text(token)
            for token in range(self.n_tokens)
            if llama_cpp.llama_vocab_get_attr(self._vocab, token) & SPECIAL_ATTRIBUTES
        )

    @cached_property
    def infill_tokens(self) -> InfillTokens | None:
        """The special tokens of a prompt with a gap. None: the model was not trained to fill gaps."""
        prefix = _token_or_none(llama_cpp.llama_vocab_fim_pre(self._vocab))
        suffix = _token_or_none(llama_cpp.llama_vocab_fim_suf(self._vocab))
        middle = _token_or_none(llama_cpp.llama_vocab_fim_mid(self._vocab))
        if prefix is None or suffix is None or middle is None:
            return None
        repository = _token_or_none(llama_cpp.llama_vocab_fim_rep(self._vocab))
        file = _token_or_none(llama_cpp.llama_vocab_fim_sep(self._vocab))
        return InfillTokens(prefix, suffix, middle, repository, file)

    def _read_separators(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sep = _token_or_none(llama_cpp.llama_vocab_sep(self._vocab))
        end = self.eos if self.eos is not None else sep
        ends = (end,) if end is not None and llama_cpp.llama_vocab_get_add_eos(self._vocab) else ()
        seps = (sep,) if sep is not None and llama_cpp.llama_vocab_get_add_sep(self._vocab) else ()
        return (*ends, *seps), ends

    def _cache_piece(self, token: int) -> bytes:
        """Return the bytes of one token, and add them to the cache."""
        piece = self._read_piece(token) if self._pieces is None else self._pieces.in_output(token)
        if len(self._cached_pieces) >= MAX_CACHED_PIECES:
            self._cached_pieces.clear()
        self._cached_pieces[token] = piece
        return piece

    def _read_piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise ValueError(f"token {token} is not in the vocabulary of {self.n_tokens} tokens")
        n_bytes = PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(n_bytes)
            written = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, n_bytes, 0, special)
            if written >= 0:
                return buffer.raw[:written]
            n_bytes = -written  # the size that llama.cpp needs

    def _read_pieces(self) -> TokenPieces:
        hidden: list[int] = []
        buffer = ctypes.create_string_buffer(PIECE_BYTES)

        def read(token: int) -> bytes:
            written = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, PIECE_BYTES, 0, False)
            if written > 0:
                return buffer.raw[:written]
            if written == 0:
                hidden.append(token)
            return self._read_piece(token, special=True)

        return TokenPieces(map(read, range(self.n_tokens)), hidden)

    def _text_or_empty(self, token: int | None) -> str:
        return "" if token is None else self.token_text(token)


def _token_or_none(token: int) -> int | None:
    return None if token == llama_cpp.LLAMA_TOKEN_NULL else token
