"""The content of a file as a Redis list of compressed blocks, so that no command and no server holds a whole file."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis

from llamaq.common import bounded_zlib

BLOCK_BYTES = 256 * 1024
"""Largest size of a block before the compression."""
BLOCKS_AT_ONCE = 8
"""Number of blocks that are read together, because the blocks that a batch writes are small."""
_THREAD_BYTES = 32 * 1024
"""More bytes are compressed in a thread, because their compression takes longer than a millisecond."""
_LEVEL = 3
"""Compresses JSON lines to about a fifth of their size, three times faster than zlib's default level."""


async def compress(data: bytes) -> list[bytes]:
    """Return the blocks of some bytes."""
    if len(data) <= _THREAD_BYTES:
        return _compress(data)
    return await asyncio.to_thread(_compress, data)


def _compress(data: bytes) -> list[bytes]:
    view = memoryview(data)
    return [zlib.compress(view[start : start + BLOCK_BYTES], _LEVEL) for start in range(0, len(data), BLOCK_BYTES)]


def decompress(block: bytes) -> bytes:
    """Return the content of a block.

    Raises:
        ProtocolError: These bytes are no block.
    """
    return bounded_zlib.decompress(block, BLOCK_BYTES, "a block of a file")


async def read_blocks(redis: Redis, key: str) -> AsyncIterator[bytes]:
    """Yield the content of a file, some blocks at a time."""
    start = 0
    while True:
        found: Any = await redis.lrange(key, start, start + BLOCKS_AT_ONCE - 1)
        if not found:
            return
        yield b"".join(decompress(block) for block in found)
        start += len(found)
