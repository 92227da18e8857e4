"""`client.tokenizer()` downloads the vocabulary and checks it before llama.cpp loads it."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import zlib
from collections.abc import Iterator

import pytest
from tests.support.worker_cards import KilledWorker

from llamaq.common.errors import LlamaqError, ModelError, ProtocolError
from llamaq.common.protocol.chat import Message
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.producer import AsyncClient, Client, InvalidRequest, MissingExtra, NoWorker, Tokenizer
from llamaq.producer import tokenizer as tokenizer_module
from llamaq.producer.testing import FakeWorker
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.engine.model_files import demo_model_path


@pytest.fixture(scope="module")
def blob() -> bytes:
    return extract_vocab(demo_model_path())


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cache: dict[str, Tokenizer] = {}
    monkeypatch.setattr(tokenizer_module, "_cache", cache)
    yield
    cache.clear()


async def publish(url: str, queue: str, packed: bytes, vocab_hash: str) -> None:
    async with KilledWorker(url, queue) as worker:
        await worker.announce(vocab_hash=vocab_hash)
        await worker.redis.set(worker.keys.vocab(vocab_hash), packed, ex=60)


def test_the_tokenizer_returns_the_tokens_of_the_model(redis_url: str, queue: str, blob: bytes) -> None:
    asyncio.run(publish(redis_url, queue, zlib.compress(blob), hashlib.sha256(blob).hexdigest()))
    vocab = Vocab.from_blob(blob)
    with Client(redis_url, queue) as client:
        tokenizer = client.tokenizer()
        tokens = tokenizer.encode("Once upon a time")
        assert tokens == vocab.encode("Once upon a time")
        assert "Once upon a time" in tokenizer.decode(tokens)
        chat = [{"role": "user", "content": "hi"}]
        assert tokenizer.encode_chat(chat) == vocab.encode_chat([Message(role="user", content="hi")])
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert tokenizer.encode_chat(parts) == tokenizer.encode_chat(chat)
        assert tokenizer.apply_template(parts) == tokenizer.apply_template(chat)
        with pytest.raises(InvalidRequest, match="the message has no text"):
            tokenizer.encode_chat([{"role": "user"}])
        assert repr(tokenizer) == "<Tokenizer of 'fake'>"
        assert client.tokenizer() is tokenizer


async def test_the_vocabulary_is_downloaded_once_for_all_clients_of_a_process(
    redis_url: str, queue: str, blob: bytes
) -> None:
    vocab_hash = hashlib.sha256(blob).hexdigest()
    await publish(redis_url, queue, zlib.compress(blob), vocab_hash)
    async with AsyncClient(redis_url, queue) as client, AsyncClient(redis_url, queue) as other:
        first = await client.tokenizer()
        await client.redis.delete(client.keys.vocab(vocab_hash))
        assert await other.tokenizer() is first


def sealed(data: bytes) -> tuple[bytes, str]:
    return zlib.compress(data), hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("packed", "vocab_hash", "error", "message"),
    [
        (b"no zlib", "0" * 64, ProtocolError, "does not decompress"),
        (zlib.compress(b"x" * 1000)[:-8], "0" * 64, ProtocolError, "truncated"),
        (zlib.compress(b"x" * 1000), "0" * 64, ProtocolError, "does not match its hash"),
        (*sealed(b"x" * 4097), ProtocolError, "larger than 4096 bytes"),
        (*sealed(b"no GGUF"), ModelError, "cannot read"),
        (*sealed(b"GGUF" + b"\xff" * 100), ModelError, "cannot read"),
    ],
)
async def test_a_damaged_vocabulary_is_refused(
    redis_url: str,
    queue: str,
    packed: bytes,
    vocab_hash: str,
    error: type[LlamaqError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_VOCAB_BYTES", 4096)
    await publish(redis_url, queue, packed, vocab_hash)
    async with AsyncClient(redis_url, queue) as client:
        with pytest.raises(error, match=message):
            await client.tokenizer()


async def test_an_expired_vocabulary_raises_no_worker(redis_url: str, queue: str) -> None:
    async with AsyncClient(redis_url, queue) as client, FakeWorker(redis_url, queue) as worker:
        await worker.announce(vocab_hash="1" * 64)
        with pytest.raises(NoWorker):
            await client.tokenizer()


async def test_without_llama_cpp_the_extra_is_named(
    redis_url: str, queue: str, blob: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(redis_url, queue, zlib.compress(blob), hashlib.sha256(blob).hexdigest())
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delitem(sys.modules, "llamaq.common.vocab.llama_vocab", raising=False)
    async with AsyncClient(redis_url, queue) as client:
        with pytest.raises(MissingExtra, match=r"llamaq\[tokenizer\]"):
            await client.tokenizer()
