"""A model's vocabulary: text to tokens and back, and chats rendered by the model's own template.

Workers and producers use this same class, so that both tokenize alike. Importing it imports llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from llamaq.common.errors import ErrorCode, JobRejected, ModelError
from llamaq.common.protocol.job_request import Message
from llamaq.common.vocab.special_tokens import Marks, SpecialTexts
from llamaq.common.vocab.text_splitter import cut_text

PIECE_BYTES = 256
# llama.cpp matches the texts of these in a prompt only when told to parse special tokens. The texts of user-defined
# tokens (Qwen's <think>, Gemma's runs of newlines) are ordinary text to it: always one token, wherever they stand.
SPECIAL_ATTRIBUTES = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN

_loading = threading.Lock()
_discard_log = llama_cpp.llama_log_callback(lambda _level, _text, _user_data: None)


class Vocab:
    """The tokens of one model.

    Safe to use from several threads. One made by `from_blob` owns its model, which `close` or the end of the
    object's life frees; no method may run then.
    """

    def __init__(self, model: Any, *, owned: bool) -> None:
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._close = weakref.finalize(self, llama_cpp.llama_model_free, model) if owned else None
        self._pieces: dict[int, bytes] = {}
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.bos = _token_or_none(llama_cpp.llama_vocab_bos(self._vocab))
        self.eos = _token_or_none(llama_cpp.llama_vocab_eos(self._vocab))
        self._adds_eos: bool = self.eos is not None and llama_cpp.llama_vocab_get_add_eos(self._vocab)
        self._has_patterns: bool = llama_cpp.llama_vocab_type(self._vocab) == llama_cpp.LLAMA_VOCAB_TYPE_BPE
        template = llama_cpp.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode(errors="replace") if template else None

    @classmethod
    def of_model(cls, model: Any) -> Self:
        """The vocabulary of a loaded llama_model (its pointer), which must outlive it."""
        return cls(model, owned=False)

    @classmethod
    def from_blob(cls, blob: bytes) -> Self:
        """Load a vocabulary from what `llamaq.worker.engine.gguf_vocab.extract_vocab` made. Raises `ModelError`."""
        descriptor, path = tempfile.mkstemp(prefix="llamaq-vocab-", suffix=".gguf")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(blob)
            params = llama_cpp.llama_model_default_params()
            params.vocab_only = True
            with _quiet_llama_cpp():
                llama_cpp.llama_backend_init()
                model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        finally:
            Path(path).unlink()
        if not model:
            raise ModelError(f"llama.cpp cannot read this vocabulary of {len(blob)} bytes")
        return cls(model, owned=True)

    def close(self) -> None:
        """Free the model if this vocabulary owns it; may be called twice."""
        if self._close is not None:
            self._close()

    @property
    def pointer(self) -> Any:
        """The llama_vocab, for calls of llama.cpp."""
        return self._vocab

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """The tokens of a text; special tokens are parsed, and BOS is added as the model wants it, but not twice.

        Raises `JobRejected` for a text so long that it must have more than `max_tokens`; one that only turns out to
        have more is tokenized all the same.
        """
        if max_tokens is not None and len(text) > max_tokens * self._longest_text:
            message = f"{len(text)} characters have more than {max_tokens} tokens"
            raise JobRejected(ErrorCode.PROMPT_TOO_LONG, message)
        bos = self._text_or_empty(self.bos)
        return self._tokenize(text, add_special=not (bos and text.startswith(bos)), parse_special=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, as a job streams it: bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        """The bytes of one token, b"" for a control token; bytes of several tokens may make one character."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return frozenset(token for token in range(self.n_tokens) if llama_cpp.llama_vocab_is_eog(self._vocab, token))

    @cached_property
    def special_texts(self) -> SpecialTexts:
        """The texts that become control tokens when special tokens are parsed."""
        return SpecialTexts(
            self._token_text(token)
            for token in range(self.n_tokens)
            if llama_cpp.llama_vocab_get_attr(self._vocab, token) & SPECIAL_ATTRIBUTES
        )

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The chat as the model's template writes it, with the beginning of an answer."""
        formatter = self._formatter
        dicts: Any = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(formatter(messages=dicts).prompt)
        except Exception as exc:  # a template may raise anything; its own refusals are ValueErrors
            raise JobRejected(ErrorCode.CHAT_TEMPLATE, f"the model's chat template refuses this: {exc}") from exc

    def encode_chat(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> list[int]:
        """The tokens of a chat. What looks like a special token inside a message's content stays text.

        Where no content holds or borders on such a text, these are the tokens of the rendered text as a whole. Raises
        `JobRejected` when the model has no chat template, its template raises, or as `encode` does.
        """
        marks = Marks()
        marked = [self._mark(message, marks) for message in messages]
        rendered = self.render_chat(marked)
        if marks.texts and not marks.hides_special:
            plain = self.render_chat(messages)
            if len(self.special_texts.find(plain)) == len(self.special_texts.find(rendered)):
                return self.encode(plain, max_tokens=max_tokens)
        if not marks.texts:
            return self.encode(rendered, max_tokens=max_tokens)
        return self._tokenize_marked(rendered, marks, max_tokens)

    def __repr__(self) -> str:
        return f"<Vocab {self.n_tokens} tokens, {'with' if self.chat_template else 'no'} chat template>"

    @cached_property
    def _formatter(self) -> Jinja2ChatFormatter:
        if self.chat_template is None:
            raise JobRejected(ErrorCode.CHAT_TEMPLATE, "the model has no chat template: send a prompt or tokens")
        try:
            return Jinja2ChatFormatter(self.chat_template, self._text_or_empty(self.eos), self._text_or_empty(self.bos))
        except Exception as exc:  # jinja2 raises errors of several kinds for a broken template
            raise JobRejected(ErrorCode.CHAT_TEMPLATE, f"the model's chat template does not compile: {exc}") from exc

    def _mark(self, message: Message, marks: Marks) -> Message:
        """The message with special texts in its content, and parts of such at its ends, replaced by marks."""
        spans = self.special_texts.find(message.content)
        marks.hides_special |= bool(spans)
        for border in self.special_texts.find_at_borders(message.content):
            if all(border.end <= span.start or span.end <= border.start for span in spans):
                spans.append(border)
        return Message(role=message.role, content=marks.put(message.content, sorted(spans))) if spans else message

    def _tokenize_marked(self, rendered: str, marks: Marks, max_tokens: int | None) -> list[int]:
        tokens: list[int] = []
        for index, (text, is_content) in enumerate(marks.split(rendered)):
            if index == 0:
                tokens += self.encode(text, max_tokens=max_tokens)
            else:
                tokens += self._tokenize(text, add_special=False, parse_special=not is_content)
        return tokens

    def _tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        specials = self.special_texts.find(text) if parse_special else []
        tokens: list[int] = []
        for index, part in enumerate(cut_text(text, specials, cuts_runs=self._has_patterns)):
            tokens += self._tokenize_part(part, add_special and index == 0, parse_special)
            if add_special and index == 0 and self._adds_eos:
                tokens.pop()  # the text is to go on
        return tokens

    def _tokenize_part(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode(errors="replace")
        n_max = len(data) + 8  # no token is empty, and only a few are added around the text
        buffer = (llama_cpp.llama_token * n_max)()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, n_max, add_special, parse_special)
        if n < 0:
            raise JobRejected(ErrorCode.PROMPT_TOO_LONG, f"llama.cpp cannot tokenize {len(data)} bytes of text")
        tokens: list[int] = buffer[:n]
        return tokens

    def _read_piece(self, token: int) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise ValueError(f"token {token} is not in the vocabulary of {self.n_tokens}")
        n_bytes = PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(n_bytes)
            written = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, n_bytes, 0, False)
            if written >= 0:
                return buffer.raw[:written]
            n_bytes = -written

    @cached_property
    def _longest_text(self) -> int:
        """Bytes of the longest token, as the vocabulary writes it: no token stands for more characters."""
        return max(len(llama_cpp.llama_vocab_get_text(self._vocab, token)) for token in range(self.n_tokens))

    def _token_text(self, token: int) -> str:
        text: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")

    def _text_or_empty(self, token: int | None) -> str:
        return "" if token is None else self._token_text(token)


def _token_or_none(token: int) -> int | None:
    return None if token == llama_cpp.LLAMA_TOKEN_NULL else token


@contextmanager
def _quiet_llama_cpp() -> Iterator[None]:
    """Keep llama.cpp from writing to stderr, and give the log back to whoever had it."""
    with _loading:
        callback, user_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
        llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(user_data))
        llama_cpp.llama_log_set(_discard_log, ctypes.c_void_p())
        try:
            yield
        finally:
            llama_cpp.llama_log_set(callback, user_data)
