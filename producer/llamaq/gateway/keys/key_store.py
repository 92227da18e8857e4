"""Stores API keys in Redis, and counts their requests there, so that all servers apply one limit together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import Keys
from llamaq.gateway.http_keys import HttpKeys
from llamaq.gateway.keys.key_file import KeyFile
from llamaq.gateway.keys.key_record import KeyRecord, hash_of, new_key

FRESH_S = 2.0
"""A key that was read less than this time ago is not read again. So a revoked key works for at most this time."""
MAX_REMEMBERED = 10_000
OPEN_LEASE_MS = 60_000
"""An open request counts for this time after its last call of `admit`. So requests of a killed server stop counting."""


class KeyStore:
    """The API keys in Redis and in a file."""

    def __init__(self, redis: Redis, keys: Keys, file: KeyFile | None = None) -> None:
        self._redis = redis
        self._keys = HttpKeys(keys.prefix)
        self._file = file
        self._known: dict[str, tuple[float, KeyRecord | None]] = {}
        """Maps the hash of a key to the time when it was read, and its record. None: there is no such key."""
        self._admit = redis.register_script(files(__package__).joinpath("admit.lua").read_text())

    def __repr__(self) -> str:
        return f"<KeyStore known={len(self._known)}>"

    async def add(self, **fields: Any) -> str:
        """Store a new key, and return its secret, which cannot be read again.

        Args:
            **fields: Fields of `KeyRecord`.

        Raises:
            InvalidRequest: A field is not valid, or there is a key of this name.
        """
        secret, record = new_key(**fields)
        if any(each.name == record.name for each in await self.list()):
            raise InvalidRequest(f"name: there is a key {record.name!r}; revoke it first, or use another name")
        await self._redis.hset(self._keys.http_keys(), hash_of(secret), record.model_dump_json())
        return secret

    async def list(self) -> Sequence[KeyRecord]:
        """Return all keys of Redis, sorted by name."""
        return sorted((await self._stored()).values(), key=lambda each: each.name)

    async def _stored(self) -> dict[bytes, KeyRecord]:
        """Return all keys of Redis by their hashes."""
        stored: Any = await self._redis.hgetall(self._keys.http_keys())
        found = {digest: codec.decode_json(KeyRecord, value) for digest, value in stored.items()}
        return {digest: record for digest, record in found.items() if record}

    async def revoke(self, name: str) -> bool:
        """Remove a key. Servers refuse it within two seconds.

        Returns:
            False if there is no key of this name.
        """
        hashes = [digest for digest, record in (await self._stored()).items() if record.name == name]
        return bool(hashes) and bool(await self._redis.hdel(self._keys.http_keys(), *hashes))

    async def named(self, name: str) -> KeyRecord | None:
        """Return the record of a key of Redis by its name. None: there is no such key."""
        return next((record for record in await self.list() if record.name == name), None)

    async def find(self, secret: str) -> KeyRecord | None:
        """Return the record of a key. None: there is no such key."""
        digest, now_s = hash_of(secret), time.monotonic()
        if self._file is not None and (record := self._file.records().get(digest)) is not None:
            return record
        read_s, record = self._known.get(digest, (float("-inf"), None))
        if now_s - read_s > FRESH_S:
            if len(self._known) >= MAX_REMEMBERED:  # a client tries many keys
                self._known.clear()
            value: Any = await self._redis.hget(self._keys.http_keys(), digest)
            record = codec.decode_json(KeyRecord, value)
            self._known[digest] = now_s, record
        return record

    async def admit(self, record: KeyRecord, request_id: str) -> float:
        """Count a request of a key. Further calls with the same id do not count it again; they renew the time for which
        it counts.

        Returns:
            0, or if the key has reached a limit: the seconds after which it may try again.
        """
        keys = [self._keys.http_rate(record.name), self._keys.http_open(record.name)]
        limits = [record.requests_per_minute or 0, record.max_open or 0]
        wait_ms: Any = await self._admit(keys=keys, args=[request_id, *limits, OPEN_LEASE_MS])
        return int(wait_ms) / 1000

    async def release(self, record: KeyRecord, request_id: str) -> None:
        """Count a request as ended."""
        await self._redis.zrem(self._keys.http_open(record.name), request_id)
