"""API keys of the HTTP server: their store, and the header of a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llamaq.common.protocol.keys import Keys
from llamaq.common.redis.connect import connect
from llamaq.gateway.keys.key_store import KeyStore


@asynccontextmanager
async def key_store(redis_url: str, prefix: str) -> AsyncIterator[KeyStore]:
    """Open the store of API keys under a prefix of keys in Redis."""
    redis = connect(redis_url, name="test")
    try:
        yield KeyStore(redis, Keys(prefix))
    finally:
        await redis.aclose()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}
