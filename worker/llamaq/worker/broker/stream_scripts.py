"""The script calls that take entries of job streams, with those that only workers need: waits, expired leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from llamaq.common.protocol.claim_scripts import ClaimScripts, entries_by_stream, entry_of, read_args
from llamaq.common.protocol.keys import GROUP, Keys
from llamaq.common.protocol.script_source import source
from llamaq.common.protocol.script_types import Reader, StreamEntries
from llamaq.common.redis.client import RetryingRedis
from llamaq.common.redis.shared_round_trips import Command

if TYPE_CHECKING:
    from redis.asyncio import Redis


class StreamScripts(ClaimScripts):
    """Calls all scripts that take entries. Each method raises `RedisError` if Redis cannot execute its script."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        super().__init__(redis, keys)
        self._redis = redis
        self._reclaim = redis.register_script(source("reclaim", __package__))

    async def wait_and_read(
        self, wait: Command, reader: Reader, streams: Sequence[str], count: int
    ) -> tuple[Any, list[tuple[str, StreamEntries]]]:
        """Send a blocking command, and right behind it what `read` sends. Redis reads when the command has ended.

        Args:
            wait: The blocking command, which uses keys of the partition of the streams.
            reader: The process that reads.
            streams: The job streams, of one partition.
            count: Number of entries to read from all streams together at most.

        Returns:
            The reply to the blocking command, which may be an error, and the entries of each stream.
        """
        redis = self._redis
        if not isinstance(redis, RetryingRedis):
            raise TypeError("connect() did not create this client of Redis")
        args = read_args(reader, streams, count, count)
        read: Command = (("EVALSHA", self._read.sha, len(streams), *streams, *args), {})
        waited, reply = await redis.call_with_retry(lambda: redis.send_together(streams[0], [wait, read]))
        if isinstance(reply, RedisError):
            raise reply
        return waited, entries_by_stream(reply)

    async def reclaim(self, stream: str, count: int, lease_ms: int, *, trusted_until_ms: int) -> StreamEntries:
        """Take entries that were requeued or whose lease has expired.

        Args:
            stream: The job stream.
            count: Number of entries to take at most.
            lease_ms: How long the caller keeps an entry without a renewal, in milliseconds.
            trusted_until_ms: Time of the server in milliseconds since the epoch. Until then, entries whose lease looks
                expired are taken. Later, only requeued entries are taken.
        """
        reply = await self._reclaim(keys=[stream], args=[GROUP, count, lease_ms, trusted_until_ms])
        return [entry_of(entry) for entry in reply]
