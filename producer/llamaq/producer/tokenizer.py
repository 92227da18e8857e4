"""The model's tokenizer and chat template in the caller's process, from the vocabulary that a worker published."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from llamaq.common.bounded_zlib import decompress
from llamaq.common.errors import MissingExtra, NoWorker, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.chat import Message
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.producer.option_synonyms import translate

if TYPE_CHECKING:
    from llamaq.common.vocab.llama_vocab import Vocab

MAX_VOCAB_BYTES = 256 * 1024 * 1024
"""Upper bound on the size of an unpacked vocabulary, in bytes."""

_cache: dict[str, Tokenizer] = {}
"""Tokenizers of this process by the hash of their vocabulary."""


class Tokenizer:
    """The tokenizer of one model. It returns the same tokens for a text as the workers of that model.

    `AsyncClient.tokenizer` and `Client.tokenizer` return instances.
    """

    def __init__(self, vocab: Vocab, model: str) -> None:
        self._vocab = vocab
        self.model = model
        """Name of the model."""

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.model!r}>"

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text prompt. Special tokens in the text are parsed.

        Args:
            text: The text of the prompt.

        Returns:
            The token ids. They start with the BOS token if the model's metadata requires it.

        Raises:
            LlamaqError: llama.cpp cannot tokenize the text.
        """
        return self._vocab.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens, as a job streams it. Control tokens have no text.

        Args:
            tokens: Token ids of the model's vocabulary.

        Raises:
            ValueError: A token id is not in the vocabulary.
        """
        return self._vocab.decode(tokens)

    def encode_chat(self, messages: Sequence[Message | Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a chat, rendered with the model's chat template.

        Args:
            messages: The messages, oldest first. Special tokens in their contents are treated as text.

        Returns:
            The token ids of the whole prompt.

        Raises:
            LlamaqError: The messages are not valid, or the model has no chat template, or rejects them.
        """
        return self._vocab.encode_chat(_validated(messages))

    def apply_template(self, messages: Sequence[Message | Mapping[str, Any]]) -> str:
        """Return a chat as text, rendered with the model's chat template.

        Args:
            messages: The messages, oldest first.

        Raises:
            LlamaqError: The messages are not valid, or the model has no chat template, or rejects them.
        """
        return self._vocab.render_chat(_validated(messages))


def _validated(messages: Sequence[Message | Mapping[str, Any]]) -> Sequence[Message]:
    """Return valid messages. Raises `InvalidRequest`."""
    return codec.build_request(translate({"messages": messages})).messages or ()


async def load_tokenizer(redis: Redis, keys: Keys, card: WorkerCard) -> Tokenizer:
    """Return the tokenizer of the worker's model. It is downloaded once per process.

    Raises:
        MissingExtra: `llamaq[tokenizer]` is not installed.
        NoWorker: The vocabulary has expired in Redis, because no worker with it is alive.
        ProtocolError: The vocabulary in Redis is damaged.
    """
    if card.vocab_hash not in _cache:
        if importlib.util.find_spec("llama_cpp") is None:
            raise MissingExtra("client.tokenizer() (client.tokenize() asks a worker instead)", "tokenizer")
        packed: Any = await redis.get(keys.vocab(card.vocab_hash))
        if packed is None:
            raise NoWorker(card.queue)
        _cache[card.vocab_hash] = await asyncio.to_thread(_build, packed, card)
    return _cache[card.vocab_hash]


def _build(packed: bytes, card: WorkerCard) -> Tokenizer:
    from llamaq.common.vocab.llama_vocab import Vocab

    return Tokenizer(Vocab.from_blob(_unpack(packed, card.vocab_hash)), card.model)


def _unpack(packed: bytes, vocab_hash: str) -> bytes:
    """Return the unpacked vocabulary. Its size and hash are checked here, because llama.cpp does not check it."""
    blob = decompress(packed, MAX_VOCAB_BYTES, "the vocabulary")
    if hashlib.sha256(blob).hexdigest() != vocab_hash:
        raise ProtocolError("the vocabulary does not match its hash")
    return blob
