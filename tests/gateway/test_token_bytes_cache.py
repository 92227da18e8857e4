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
