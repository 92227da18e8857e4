"""Tokens and chat templates in the caller's process, from the vocabulary that the worker published."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from llamaq.common.errors import MissingExtra, NoWorker, ProtocolError
from llamaq.common.protocol.job_request import Message
from llamaq.common.protocol.keys import Keys
from llamaq.common.protocol.queue_state import WorkerCard

if TYPE_CHECKING:
    from llamaq.common.vocab.vocab import Vocab

MAX_VOCAB_BYTES = 256 * 1024 * 1024

_cache: dict[str, Tokenizer] = {}


class Tokenizer:
    """The tokens of one model. The same text gives the same tokens as the worker makes of it."""

    def __init__(self, vocab: Vocab, model: str) -> None:
        self._vocab = vocab
        self.model = model

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.model!r}>"

    def encode(self, text: str) -> list[int]:
        """Tokens as for a text prompt: with BOS where the model wants it, special tokens parsed."""
        return self._vocab.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, as a job would stream it."""
        return self._vocab.decode(tokens)

    def encode_chat(self, messages: Sequence[Message | Mapping[str, str]]) -> list[int]:
        """Tokens as for a chat, rendered by the model's template; special tokens in contents stay text.

        Raises `LlamaqError` when the model has no template or it refuses the messages.
        """
        return self._vocab.encode_chat([Message.model_validate(message) for message in messages])


async def load_tokenizer(redis: Redis, keys: Keys, card: WorkerCard) -> Tokenizer:
    """The tokenizer of this worker's model; fetched once per process."""
    if card.vocab_hash not in _cache:
        if importlib.util.find_spec("llama_cpp") is None:
            raise MissingExtra("client.tokenizer()", "tokenizer")
        packed: Any = await redis.get(keys.vocab(card.vocab_hash))
        if packed is None:
            raise NoWorker(card.queue)
        _cache[card.vocab_hash] = await asyncio.to_thread(_build, packed, card)
    return _cache[card.vocab_hash]


def _build(packed: bytes, card: WorkerCard) -> Tokenizer:
    from llamaq.common.vocab.vocab import Vocab

    return Tokenizer(Vocab.from_blob(_unpack(packed, card.vocab_hash)), card.model)


def _unpack(packed: bytes, vocab_hash: str) -> bytes:
    """The vocabulary's bytes, if they are what their hash says: llama.cpp parses them, and Redis may hold anything."""
    inflater = zlib.decompressobj()
    try:
        blob = inflater.decompress(packed, MAX_VOCAB_BYTES)
    except zlib.error as exc:
        raise ProtocolError(f"the vocabulary does not decompress: {exc}") from exc
    if not inflater.eof:
        raise ProtocolError(f"the vocabulary is cut off, or larger than {MAX_VOCAB_BYTES} bytes")
    if hashlib.sha256(blob).hexdigest() != vocab_hash:
        raise ProtocolError("the vocabulary is not what its hash says")
    return blob
