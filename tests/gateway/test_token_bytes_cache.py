"""The bytes of tokens are those of the model that has generated them."""

from __future__ import annotations

import pytest

from llamaq.common.protocol.text_commands import TextReply
from llamaq.gateway.queue_directory import QueueDirectory
from llamaq.gateway.settings import serve_settings
from llamaq.gateway.token_bytes_cache import TokenBytesCache
from llamaq.producer.queries import text_commands
from llamaq.producer.testing import FakeWorker


async def test_bytes_are_kept_only_for_a_known_vocabulary(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [b"a", b"b", b"c"]

    async def ask(*_: object, **__: object) -> TextReply:
        return TextReply(pieces=(list(replies.pop(0)),))

    monkeypatch.setattr(text_commands, "ask", ask)
    queues = QueueDirectory(serve_settings(redis_url=redis_url, queue=queue))
    try:
        pieces, client = TokenBytesCache(queues), await queues.client(queue)
        # A worker that has started less than a moment ago answers, although the last list of workers does not have it.
        assert await pieces.of(client, {1}) == {1: b"a"}
        assert await pieces.of(client, {1}) == {1: b"b"}
        async with FakeWorker(redis_url, queue) as worker:
            await worker.announce()
            await queues.served(is_fresh=True)
            assert [await pieces.of(client, {1}) for _ in range(2)] == [{1: b"c"}, {1: b"c"}]
    finally:
        await queues.aclose()


async def test_the_known_bytes_are_used_while_the_queue_has_no_worker(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    async def ask(*_: object, tokens: list[int], **__: object) -> TextReply:
        asked.append(tokens)
        return TextReply(pieces=tuple(list(b"%d" % token) for token in tokens))

    monkeypatch.setattr(text_commands, "ask", ask)
    queues = QueueDirectory(serve_settings(redis_url=redis_url, queue=queue))
    try:
        pieces, client = TokenBytesCache(queues), await queues.client(queue)
        async with FakeWorker(redis_url, queue) as worker:
            await worker.announce()
            assert await pieces.of(client, {1, 2}) == {1: b"1", 2: b"2"}
        await queues.served(is_fresh=True)
        assert (await pieces.of(client, {2}))[2] == b"2"
        assert asked == [[1, 2]]
        # A worker that is not listed yet may have another vocabulary.
        assert [await pieces.of(client, {2, 3}) for _ in range(2)] == [{2: b"2", 3: b"3"}] * 2
        assert asked == [[1, 2], [2, 3], [2, 3]]
        async with FakeWorker(redis_url, queue) as other:
            await other.announce(vocab_hash="1" * 64)
            await pieces.of(client, {1})
        assert asked[3:] == [[1]]
    finally:
        await queues.aclose()
