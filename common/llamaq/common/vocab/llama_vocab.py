"""The vocabulary of a model: converts text to tokens and back, and renders chats with the model's template.

Workers and producers use the same class, so both get the same tokens. Importing this module imports llama.cpp.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import tempfile
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Self

import llama_cpp

from llamaq.common.errors import ErrorCode, JobRejected, ModelError
from llamaq.common.protocol.answer_tags import (
    ANSWER_TAGS,
    MISTRAL_THINK_CLOSE,
    MISTRAL_THINK_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
)
from llamaq.common.protocol.chat import Message, TemplateOptions, arguments_as_object
from llamaq.common.vocab.chat_template import ChatTemplate
from llamaq.common.vocab.special_token_masking import Placeholders, Span, SpecialTokenFinder
from llamaq.common.vocab.split_long_text import split_text
from llamaq.common.vocab.token_pieces import TokenPieces

PIECE_BYTES = 256
"""Initial size of the buffer for the bytes of a token. Few tokens are longer."""
MAX_CACHED_PIECES = 16_384
"""Number of tokens whose bytes are cached, in 2 MB. Most texts consist of fewer different tokens."""
# llama.cpp matches the texts of these tokens only with `parse_special`. The texts of user-defined tokens (<think> of
# Qwen, runs of newlines of Gemma) are ordinary text: llama.cpp always makes one token of them.
SPECIAL_ATTRIBUTES = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
TAG_ATTRIBUTES = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
C_WHITE_SPACE = " \t\n\v\f\r"
"""What llama.cpp removes next to some special tokens."""
# The tags that chat templates look for in the assistant's earlier messages, to leave out its reasoning. None of them
# begins or ends a message.
REASONING_TAGS = (THINK_OPEN, THINK_CLOSE, MISTRAL_THINK_OPEN, MISTRAL_THINK_CLOSE)

NO_OPTIONS = TemplateOptions()
_WORD = re.compile(r"[^ \t\n\r]+")
_log_lock = threading.Lock()
_discard_log = llama_cpp.llama_log_callback(lambda _level, _text, _user_data: None)


class Vocab:
    """The tokens of one model. Thread-safe.

    Args:
        model: Pointer to a llama_model.
        owned: Whether the vocabulary owns the model. An owned model is freed with this object; any other model must
            live longer.
    """

    def __init__(self, model: Any, *, owned: bool) -> None:
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._cached_pieces: dict[int, bytes] = {}
        self._pieces: TokenPieces | None = None
        if owned:
            weakref.finalize(self, llama_cpp.llama_model_free, model)
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.bos = _token_or_none(llama_cpp.llama_vocab_bos(self._vocab))
        self.eos = _token_or_none(llama_cpp.llama_vocab_eos(self._vocab))
        self.adds_eos: bool = self.eos is not None and llama_cpp.llama_vocab_get_add_eos(self._vocab)
        self.kind: int = llama_cpp.llama_vocab_type(self._vocab)
        """The type of the tokenizer, a `LLAMA_VOCAB_TYPE_…` of llama.cpp."""
        self.adds_bos: bool = self.bos is not None and llama_cpp.llama_vocab_get_add_bos(self._vocab)
        self.separators = self._read_separators()
        """The special tokens that follow the query, and those that follow the document, in a prompt for reranking."""
        template = llama_cpp.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode(errors="replace") if template else None
        template = llama_cpp.llama_model_chat_template(model, b"rerank")
        self.rerank_template: str | None = template.decode(errors="replace") if template else None
        """Text of a prompt for reranking, with `{query}` and `{document}`. None: special tokens separate the two."""

    @classmethod
    def of_model(cls, model: Any) -> Self:
        """Return the vocabulary of a loaded model, given its llama_model pointer. The model must live longer."""
        return cls(model, owned=False)

    @classmethod
    def from_blob(cls, blob: bytes) -> Self:
        """Load a vocabulary from the bytes that `llamaq.worker.engine.gguf_vocab.extract_vocab` returned.

        Raises:
            ModelError: llama.cpp cannot load the bytes.
        """
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

    @property
    def pointer(self) -> Any:
        """Pointer to the llama_vocab, for calls of llama.cpp."""
        return self._vocab

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
        self._check_length(text, max_tokens)
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
        self._check_length(text, max_tokens)
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
        self._check_length(text, max_tokens)
        return self._tokenize(text, add_special=False, parse_special=parse_special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, as a job streams it. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode(errors="replace")

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
        """The bytes of all tokens, also of control tokens. The first access reads all tokens."""
        if self._pieces is None:
            self._pieces = self._read_pieces()
        return self._pieces

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
    def special_tokens(self) -> SpecialTokenFinder:
        """The finder of the texts that llama.cpp turns into special tokens with `parse_special`."""
        return SpecialTokenFinder(
            self.token_text(token)
            for token in range(self.n_tokens)
            if llama_cpp.llama_vocab_get_attr(self._vocab, token) & SPECIAL_ATTRIBUTES
        )

    @cached_property
    def tag_tokens(self) -> dict[str, int]:
        """The tags of reasoning and tool calls that are a control token or a user-defined token, with the token."""
        found = {tag: self._tokenize_part(tag, add_special=False, parse_special=True) for tag in ANSWER_TAGS}
        return {tag: tokens[0] for tag, tokens in found.items() if len(tokens) == 1 and self._is_tag(tokens[0])}

    def render_chat(self, messages: Sequence[Message], options: TemplateOptions = NO_OPTIONS) -> str:
        """Return the chat as text, rendered by the model's chat template.

        Args:
            messages: The messages, from the oldest to the newest.
            options: What the template gets in addition.

        Raises:
            JobRejected: The model has no chat template, or the template raises an error.
        """
        return self._template.render(messages, options)

    def encode_chat(
        self, messages: Sequence[Message], options: TemplateOptions = NO_OPTIONS, *, max_tokens: int | None = None
    ) -> list[int]:
        """Return the tokens of a chat.

        A special token's text inside the content of a message, or inside the arguments of a call, stays text. If there
        is none, and no content forms one with the text next to it, the result equals the tokens of the whole rendered
        chat. Otherwise the template gets placeholders for these texts, and for the beginning and end of a content if
        they could be parts of such a text. So it prints these parts, but cannot look for them or change them.

        Only the tags of reasoning in the assistant's messages are shown to a template that does more with them than to
        print them: it may leave out the reasoning. Each of these tags in its result is the special token.

        Args:
            messages: The messages, from the oldest to the newest.
            options: What the template gets in addition.
            max_tokens: As in `encode`.

        Raises:
            JobRejected: As in `render_chat` and `encode`.
        """
        self._refuse_special_texts("tools", json.loads(options.tools))
        self._refuse_special_texts("chat_template_kwargs", json.loads(options.kwargs))
        placeholders = Placeholders()
        for message in messages:
            self._check_message(message)
        called = [self._hide_arguments(message, placeholders) for message in messages]
        spans_of = [self.special_tokens.find(message.content) for message in messages]
        found_special = bool(placeholders.originals) or any(spans_of)
        hidden = [self._hide(message, spans, placeholders) for message, spans in zip(called, spans_of, strict=True)]
        rendered = self.render_chat(hidden, options)
        # If no content and no argument has a special text, placeholders stand only for the beginnings and ends of
        # contents. If the chat without placeholders has no additional special text, no beginning or end is part of a
        # special text. Then the placeholders are not needed.
        if placeholders.originals and not found_special:
            plain = self.render_chat(messages, options)
            if len(self.special_tokens.find(plain)) == len(self.special_tokens.find(rendered)):
                return self.encode(plain, max_tokens=max_tokens)
        if not placeholders.originals:
            return self.encode(rendered, max_tokens=max_tokens)
        shown = list(map(self._reasoning_tags, messages, spans_of))
        if any(shown):
            hidden = list(map(self._hide, called, spans_of, repeat(placeholders), shown))
            with_tags = self.render_chat(hidden, options)
            # Tags that the template only prints stay text.
            if placeholders.restore(with_tags) != placeholders.restore(rendered):
                rendered = with_tags
        return self._tokenize_hidden(rendered, placeholders, max_tokens)

    def __repr__(self) -> str:
        return f"<Vocab {self.n_tokens} tokens, {'with' if self.chat_template else 'no'} chat template>"

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise JobRejected(ErrorCode.CHAT_TEMPLATE, "the model has no chat template: send a prompt or tokens")
        return ChatTemplate(self.chat_template, eos=self._text_or_empty(self.eos), bos=self._text_or_empty(self.bos))

    def _is_tag(self, token: int) -> bool:
        """Return whether a token is a control token or a user-defined token. Other tokens are parts of any text."""
        return bool(llama_cpp.llama_vocab_get_attr(self._vocab, token) & TAG_ATTRIBUTES)

    def _check_length(self, text: str, max_tokens: int | None) -> None:
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

    def _read_separators(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sep = _token_or_none(llama_cpp.llama_vocab_sep(self._vocab))
        end = self.eos if self.eos is not None else sep
        ends = (end,) if end is not None and llama_cpp.llama_vocab_get_add_eos(self._vocab) else ()
        seps = (sep,) if sep is not None and llama_cpp.llama_vocab_get_add_sep(self._vocab) else ()
        return (*ends, *seps), ends

    def _refuse_special_texts(self, place: str, value: object) -> None:
        """Raise `JobRejected` if the value has the text of a special token, which the template would print."""
        if any(map(self.special_tokens.find, _texts_in(value))):
            raise JobRejected(ErrorCode.INVALID_REQUEST, f"{place} contains the text of a special token")

    def _check_message(self, message: Message) -> None:
        """Raise `JobRejected` if a field has the text of a special token. Contents and arguments may have it."""
        values = message.model_dump(exclude_none=True)
        for call in values.get("tool_calls", ()):
            del call["function"]["arguments"]
        for name, value in values.items():
            if name not in ("role", "content"):
                self._refuse_special_texts(f"messages: {name}", value)

    def _hide_arguments(self, message: Message, placeholders: Placeholders) -> Message:
        """Replace the special texts in the arguments of calls. In a JSON text, escapes may hide such a text."""

        def hide(text: str) -> str:
            return placeholders.replace(text, self.special_tokens.find(text))

        calls = []
        for call in message.tool_calls or ():
            try:
                arguments = _map_texts(hide, arguments_as_object(call.function.arguments))
            except RecursionError as exc:
                reason = "messages: the arguments of a call are nested too deeply"
                raise JobRejected(ErrorCode.INVALID_REQUEST, reason) from exc
            function = call.function.model_copy(update={"arguments": arguments})
            calls.append(call.model_copy(update={"function": function}))
        return message.model_copy(update={"tool_calls": tuple(calls)}) if calls else message

    def _hide(
        self, message: Message, spans: Sequence[Span], placeholders: Placeholders, shown: Sequence[Span] = ()
    ) -> Message:
        """Replace the special texts at `spans` in the content, and parts of special texts at its edges.

        The special texts at `shown` stay. A template may leave them out and join what is around them, so the parts of
        special texts next to them are replaced too.
        """
        content = message.content
        hidden = sorted(set(spans) - set(shown))
        bounds = [0, *chain.from_iterable(shown), len(content)]
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            for edge in self.special_tokens.find_at_edges(content[start:end]):
                moved = Span(start + edge.start, start + edge.end)
                if not _overlaps(moved, spans):
                    hidden.append(moved)
        if not hidden:
            return message
        return message.model_copy(update={"content": placeholders.replace(content, sorted(hidden))})

    def _reasoning_tags(self, message: Message, spans: Sequence[Span]) -> list[Span]:
        """Return those spans that are tags of reasoning, for a message of the assistant. A user's text never shows."""
        if message.role != "assistant":
            return []
        return [span for span in spans if message.content[span.start : span.end] in REASONING_TAGS]

    def _tokenize_hidden(self, rendered: str, placeholders: Placeholders, max_tokens: int | None) -> list[int]:
        """Return the tokens of a rendered chat, in which the replaced parts of contents are text."""
        self._check_length(placeholders.restore(rendered), max_tokens)
        tokens: list[int] = []
        for index, (text, parse_special) in enumerate(self._split_at_special_tokens(rendered, placeholders)):
            if index == 0:
                tokens += self.encode(text)
            else:
                tokens += self._tokenize(text, add_special=False, parse_special=parse_special)
        return tokens

    def _split_at_special_tokens(self, rendered: str, placeholders: Placeholders) -> Iterator[tuple[str, bool]]:
        """Split a rendered chat before and after each text between two special tokens that has a replaced part.

        llama.cpp tokenizes the text between two special tokens as a whole, and some vocabularies put a space before it.
        So a replaced part is not tokenized alone, but with all text up to the special tokens around it.

        Yields:
            A part without placeholders, and whether its special texts are special tokens. The first part has no
            replaced parts; it may be empty.
        """
        parsed, last, run, is_hidden = "", "", "", False
        for text, is_content in placeholders.split(rendered):
            end = 0
            for span in [] if is_content else self.special_tokens.find(text):
                run, special, end = run + text[end : span.start], text[span.start : span.end], span.end
                if is_hidden:
                    yield from ((parsed, True), (self._strip_at_special_tokens(last, run, special), False))
                    parsed, run = "", ""
                parsed, last, run, is_hidden = parsed + run + special, special, "", False
            run += text[end:]
            is_hidden |= is_content
        if is_hidden:
            yield from ((parsed, True), (self._strip_at_special_tokens(last, run, ""), False))
        else:
            yield parsed + run, True

    def _strip_at_special_tokens(self, before: str, text: str, after: str) -> str:
        """Return a text without the white space that the special tokens before and after it remove, as in phi-3."""
        if before and self._attributes_of(before) & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP:
            text = text.lstrip(C_WHITE_SPACE)
        if after and self._attributes_of(after) & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP:
            text = text.rstrip(C_WHITE_SPACE)
        return text

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

    @cached_property
    def _max_token_bytes(self) -> int:
        """Length in bytes of the longest token text: an upper bound on the characters that one token encodes."""
        return max(len(llama_cpp.llama_vocab_get_text(self._vocab, token)) for token in range(self.n_tokens))

    def token_text(self, token: int) -> str:
        """Return the text of a token as the vocabulary has it, which is not the text that it stands for."""
        text: bytes = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")

    def _text_or_empty(self, token: int | None) -> str:
        return "" if token is None else self.token_text(token)


def _count_words(text: str) -> int:
    """Return the number of words that have a letter or digit. WordPiece may remove other words, such as control codes.

    Only white space that each tokenizer takes for white space ends a word.
    """
    return sum(any(map(str.isalnum, word)) for word in _WORD.findall(text))


def _overlaps(part: Span, spans: Sequence[Span]) -> bool:
    """Return whether a part of a text has a character in common with one of the spans, which are in order."""
    index = bisect_left(spans, (part.end, 0)) - 1  # the last span that starts before the end of the part
    return index >= 0 and spans[index].end > part.start


def _texts_in(value: object) -> Iterator[str]:
    """Yield all texts in a value that JSON could contain."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts_in(name)
            yield from _texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts_in(inner)


def _map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Return a value of JSON in which each text, also each name, is replaced by what `change` returns for it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _map_texts(change, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(change, inner) for inner in value]
    return value


def _token_or_none(token: int) -> int | None:
    return None if token == llama_cpp.LLAMA_TOKEN_NULL else token


@contextmanager
def _quiet_llama_cpp() -> Iterator[None]:
    """Discard the log of llama.cpp inside the block, then restore the previous log callback."""
    with _log_lock:
        callback, user_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
        llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(user_data))
        llama_cpp.llama_log_set(_discard_log, ctypes.c_void_p())
        try:
            yield
        finally:
            llama_cpp.llama_log_set(callback, user_data)
