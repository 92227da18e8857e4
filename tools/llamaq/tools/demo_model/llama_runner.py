"""Runs llama.cpp for measurements: decodes one sequence, or several in one batch, and returns their logits.

It does not use the worker: the measurements must not depend on code that is tested with the model.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from llamaq.tools.demo_model.document import BOS, EOS

Logits = npt.NDArray[np.float32]

BATCH_TOKENS: Final = 2048
SEQUENCES: Final = 8
_DISCARD_LOG: Final = llama_cpp.llama_log_callback(lambda *_: None)


class LlamaRunner:
    """A model and one context of `SEQUENCES` sequences that share a pool of cells."""

    def __init__(self, path: Path) -> None:
        """Load the GGUF file `path`. `load_s` is the time that model and context took, in seconds."""
        llama_cpp.llama_log_set(_DISCARD_LOG, None)
        llama_cpp.llama_backend_init()
        started_s = time.perf_counter()
        model_params = llama_cpp.llama_model_default_params()
        self.model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 2 * BATCH_TOKENS
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = 512
        params.n_seq_max = SEQUENCES
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = 1  # more gain little with such a small model
        self.context: Any = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise ValueError(f"llama.cpp cannot make a context for {path}")
        self.load_s = time.perf_counter() - started_s
        self.vocabulary: Any = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary_size: int = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._lengths = [0] * SEQUENCES

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    @property
    def training_context(self) -> int:
        """Length of the model's training context in tokens, as stated in the file."""
        return int(llama_cpp.llama_model_n_ctx_train(self.model))

    def tokenize(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Return the token ids of a text. Special tokens in the text are recognized."""
        raw = text.encode()
        ids = (llama_cpp.llama_token * (len(raw) + 2))()
        count = llama_cpp.llama_tokenize(self.vocabulary, raw, len(raw), ids, len(ids), add_bos, True)
        return list(ids[:count])

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens."""
        buffer = ctypes.create_string_buffer(256)
        pieces = []
        for token in ids:
            size = llama_cpp.llama_token_to_piece(self.vocabulary, token, buffer, len(buffer), 0, False)
            pieces.append(buffer.raw[:size])
        return b"".join(pieces).decode(errors="replace")

    def is_end(self, token: int) -> bool:
        """Return whether generation ends with this token."""
        return bool(llama_cpp.llama_vocab_is_eog(self.vocabulary, token))

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation in the model's chat template, up to the assistant's answer."""
        template = llama_cpp.llama_model_chat_template(self.model, None).decode()
        formatter = Jinja2ChatFormatter(template=template, eos_token=EOS, bos_token=BOS)
        prompt = formatter(messages=list(messages)).prompt
        return self.tokenize(prompt, add_bos=False)

    def clear(self) -> None:
        """Remove all sequences from the context."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self._lengths = [0] * SEQUENCES

    def decode(self, parts: Sequence[tuple[int, Sequence[int]]]) -> Logits:
        """Decode several sequences in one batch.

        Args:
            parts: Pairs of a sequence and the tokens to append to it.

        Returns:
            The logits of the last token of each part: an array of shape (parts, vocabulary).
        """
        index = 0
        for sequence, tokens in parts:
            for place, token in enumerate(tokens):
                self._batch.token[index] = token
                self._batch.pos[index] = self._lengths[sequence] + place
                self._batch.n_seq_id[index] = 1
                self._batch.seq_id[index][0] = sequence
                self._batch.logits[index] = place == len(tokens) - 1
                index += 1
            self._lengths[sequence] += len(tokens)
        self._batch.n_tokens = index
        if status := llama_cpp.llama_decode(self.context, self._batch):
            raise ValueError(f"llama_decode returned {status}")
        pointer = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, shape=(len(parts), self.vocabulary_size)).copy()

    def greedy(
        self, ids: Sequence[int], max_tokens: int, on_logits: Callable[[Logits], None] | None = None
    ) -> tuple[list[int], bool]:
        """Generate greedily from an empty context.

        Args:
            ids: The prompt.
            max_tokens: Upper bound on the tokens to generate.
            on_logits: Called with the logits from which each token is chosen.

        Returns:
            The tokens, and whether the generation ended with an end token.
        """
        self.clear()
        (row,) = self.decode([(0, ids)])
        out: list[int] = []
        while len(out) < max_tokens:
            if on_logits is not None:
                on_logits(row)
            token = int(row.argmax())
            if self.is_end(token):
                return out, True
            out.append(token)
            (row,) = self.decode([(0, [token])])
        return out, False
