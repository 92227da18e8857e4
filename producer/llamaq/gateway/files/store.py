"""Stores the files of one API key in Redis, within a bound on their number and their size together."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from redis.asyncio import Redis

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol import codec
from llamaq.common.protocol.keys import Keys
from llamaq.gateway.files.blocks import BLOCK_BYTES, compress, read_blocks
from llamaq.gateway.files.record import MAX_TTL_S, FileRecord, missing_file, too_large_file
from llamaq.gateway.http.errors import RequestRefused
from llamaq.gateway.http_keys import HttpKeys

MAX_FILES = 1000
"""Largest number of files of an API key."""
UPLOAD_S = 3600
"""Longest time of an upload. After this time, the incomplete upload of a killed server is removed."""


class FileStore:
    """The files of one API key."""

    def __init__(self, redis: Redis, keys: Keys, owner: str | None, *, max_files_bytes: int) -> None:
        """Refer to files.

        Args:
            redis: The connection.
            keys: The key names.
            owner: Name of the API key. None: the server requires none.
            max_files_bytes: Largest size of all files of the API key together.
        """
        self._redis = redis
        self._keys = HttpKeys(keys.prefix)
        self._records: str = self._keys.http_files(owner or "")
        self._max_files_bytes = max_files_bytes

    def __repr__(self) -> str:
        return f"<FileStore {self._records}>"

    async def listed(self) -> list[FileRecord]:
        """Return the files, the oldest first."""
        return sorted((each for each in await self._all() if each.is_complete), key=lambda each: each.created_ms)

    async def _all(self) -> list[FileRecord]:
        """Return all records, also records of uploads, and remove expired records."""
        stored: Any = await self._redis.hgetall(self._records)
        records = [record for value in stored.values() if (record := codec.decode_json(FileRecord, value))]
        now_s = time.time()
        expired = [each.id for each in records if each.expires_s <= now_s]
        if expired:
            await self._redis.hdel(self._records, *expired)
        return [each for each in records if each.expires_s > now_s]

    async def find(self, file_id: str, param: str | None = None) -> FileRecord:
        """Return a file.

        Args:
            file_id: The id.
            param: The field that has the id, for the error. None: it is in the path.

        Raises:
            RequestRefused: The API key has no such file.
        """
        stored: Any = await self._redis.hget(self._records, file_id)
        record = codec.decode_json(FileRecord, stored)
        if record is None or not record.is_complete or record.expires_s <= time.time():
            raise missing_file(file_id, param)
        return record

    async def save(self, record: FileRecord) -> None:
        """Store a record, and let the content expire with it."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.expireat(self._keys.http_file(record.id), record.expires_s)
            pipe.hset(self._records, record.id, record.model_dump_json())
            pipe.expire(self._records, MAX_TTL_S + UPLOAD_S)  # no record is needed longer
            await pipe.execute()

    async def keep_until(self, record: FileRecord, time_s: int) -> None:
        """Keep a file at least until this time."""
        if record.expires_s < time_s:
            await self.save(record.model_copy(update={"expires_s": time_s}))

    async def delete(self, file_id: str) -> bool:
        """Remove a file. Return False if there is none."""
        try:
            content = self._keys.http_file(file_id)
        except InvalidRequest:
            return False
        if not await self._redis.hdel(self._records, file_id):
            return False
        await self._redis.unlink(content)
        return True

    def read(self, record: FileRecord) -> AsyncIterator[bytes]:
        """Yield the content of a file, block by block."""
        return read_blocks(self._redis, self._keys.http_file(record.id))

    async def begin_upload(self, most_bytes: int) -> Upload:
        """Begin to store a file.

        Args:
            most_bytes: The largest size that the file may reach.

        Raises:
            RequestRefused: The API key has too many files, or its files would be too large together.
        """
        now_ms = time.time_ns() // 1_000_000
        file_id = f"file-{secrets.token_hex(16)}"
        expires_s = now_ms // 1000 + UPLOAD_S
        record = FileRecord(id=file_id, n_bytes=most_bytes, created_ms=now_ms, expires_s=expires_s)
        upload = Upload(self._redis, self, self._keys.http_file(file_id), record)
        await self.save(record)  # first, so that uploads at the same time count each other
        records = await self._all()
        n_bytes = sum(each.n_bytes for each in records)
        if len(records) > MAX_FILES or n_bytes > self._max_files_bytes:
            await self.delete(file_id)
            raise RequestRefused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the files would have {n_bytes} bytes together (--max-files-bytes {self._max_files_bytes}), or "
                f"there would be more than {MAX_FILES}: delete files, or let them expire earlier",
                code="file_quota_exceeded",
            )
        return upload


class Upload:
    """A file that is being stored."""

    def __init__(self, redis: Redis, store: FileStore, key: str, record: FileRecord) -> None:
        self._redis = redis
        self._store = store
        self._key = key
        self._record = record
        self._buffer = bytearray()
        self._n_bytes = self._n_blocks = 0

    def __repr__(self) -> str:
        return f"<Upload {self._record.id} bytes={self._n_bytes}>"

    async def write(self, data: bytes) -> None:
        """Append bytes to the content.

        Raises:
            RequestRefused: The file is too large.
        """
        self._n_bytes += len(data)
        if self._n_bytes > self._record.n_bytes:
            raise too_large_file(self._record.n_bytes)
        self._buffer += data
        if len(self._buffer) >= BLOCK_BYTES:
            await self._push()

    async def _push(self) -> None:
        if self._buffer:
            content, self._buffer = bytes(self._buffer), bytearray()
            blocks = await compress(content)
            async with self._redis.pipeline(transaction=True) as pipe:  # no server may die between the two commands
                if self._n_blocks:  # blocks after these are of an earlier try, whose reply was lost
                    pipe.ltrim(self._key, 0, self._n_blocks - 1)
                else:
                    pipe.delete(self._key)
                pipe.rpush(self._key, *blocks)
                pipe.expireat(self._key, self._record.expires_s)
                await pipe.execute()
            self._n_blocks += len(blocks)

    async def finish(self, filename: str, purpose: str, ttl_s: int) -> FileRecord:
        """Store the rest, and return the record of the file."""
        await self._push()
        changes = {
            "filename": filename,
            "purpose": purpose,
            "n_bytes": self._n_bytes,
            "expires_s": self._record.created_ms // 1000 + ttl_s,
            "is_complete": True,
        }
        record = self._record.model_copy(update=changes)
        await self._store.save(record)
        return record

    async def abandon(self) -> None:
        """Delete the incomplete file."""
        await self._store.delete(self._record.id)
