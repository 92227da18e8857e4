"""The vocabulary of a model: loads it, converts text and chats to tokens, and tokens to text.

Workers and producers use the same class, so both get the same tokens. Importing this module imports llama.cpp. The
class inherits what it knows of single tokens from `token_table`, and the conversion of texts from `text_tokenizer`.
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

from llamaq.common.errors import ErrorCode, JobRejected, ModelError
from llamaq.common.protocol.chat import Message, TemplateOptions
from llamaq.common.vocab.chat_template import ChatTemplate
from llamaq.common.vocab.chat_tokenizer import ChatTokenizer
from llamaq.common.vocab.text_tokenizer import TextTokenizer

NO_OPTIONS = TemplateOptions()
_log_lock = threading.Lock()
_discard_log = llama_cpp.llama_log_callback(lambda _level, _text, _user_data: None)


class Vocab(TextTokenizer):
    """The vocabulary of one model: its tokens, its tokenizer and its chat template. Thread-safe.

    Args:
        model: Pointer to a llama_model.
        owned: Whether the vocabulary owns the model. An owned model is freed with this object; any other model must
            live longer.
    """

    def __init__(self, model: Any, *, owned: bool) -> None:
        if owned:
            weakref.finalize(self, llama_cpp.llama_model_free, model)
        super().__init__(llama_cpp.llama_model_get_vocab(model))
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

        A special token's text inside the content or the reasoning of a message, or inside the arguments of a call,
        stays text. If there is none, and no content or reasoning forms one with the text next to it, the result equals
        the tokens of the whole rendered chat. `ChatTokenizer` says what the template gets otherwise.

        Args:
            messages: The messages, from the oldest to the newest.
            options: What the template gets in addition.
            max_tokens: As in `encode`.

        Raises:
            JobRejected: As in `render_chat` and `encode`.
        """
        return ChatTokenizer(self, self.render_chat).encode(messages, options, max_tokens)

    def __repr__(self) -> str:
        return f"<Vocab {self.n_tokens} tokens, {'with' if self.chat_template else 'no'} chat template>"

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise JobRejected(ErrorCode.CHAT_TEMPLATE, "the model has no chat template: send a prompt or tokens")
        return ChatTemplate(self.chat_template, eos=self._text_or_empty(self.eos), bos=self._text_or_empty(self.bos))


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
