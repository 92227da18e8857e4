"""From Redis into the worker: claim entries of the job streams, take over lost ones, begin attempts, bury garbage."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common import codec
from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.keys import GROUP, JobId, Keys
from llamaq.common.messages import Priority, Tokens
from llamaq.common.scripts import HANDED_BACK, NEVER_RENEWED_MS, Attempt, Claim, Scripts

log = logging.getLogger(__name__)

MAX_DEAD = 1000
"""Entries kept in the stream of dead letters, about."""
MAX_CLAIMED = 1000
"""More than a worker ever has claimed."""
MAX_DEAD_BYTES = 4096
"""Of what a buried entry held, this much is kept for the curious."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An attempt that began: the claimed entry, its attempt, and the tokens that earlier attempts published."""

    claim: Claim
    attempt: Attempt
    published: list[int]


class Inbox:
    """One worker's reading end of a queue."""

    def __init__(
        self, redis: Redis, keys: Keys, *, queue: str, partitions: int, worker_id: str, lease_s: float
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys)
        self._queue = queue
        self._partitions = range(partitions)
        self._worker_id = worker_id
        self._lease_ms = int(lease_s * 1000)

    async def open(self, *, max_queue: int) -> None:
        """Make the consumer groups, and tell submitters the bound of the queue."""
        for partition in self._partitions:
            for priority in Priority:
                await self._create_group(self._keys.jobs(self._queue, partition, priority))
            await self._redis.hset(self._keys.config(self._queue, partition), "max_queue", str(max_queue))

    async def _create_group(self, stream: str) -> None:
        try:
            await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as exc:
            if "BUSYGROUP" not in str(exc):
                raise

    async def claim(self, count: int, *, block_s: float) -> list[Claim]:
        """Up to `count` new entries, interactive ones first; waits up to `block_s` for the first.

        While it waits, several streams may each give one at the same moment.
        """
        claims: list[Claim] = []
        for priority in Priority:
            if len(claims) < count:
                claims += await self._read(count - len(claims), [priority], None)
        return claims or await self._read(1, list(Priority), int(block_s * 1000))

    async def _read(self, count: int, priorities: list[Priority], block_ms: int | None) -> list[Claim]:
        streams: dict[Any, Any] = {
            self._keys.jobs(self._queue, partition, priority): ">"
            for priority in priorities
            for partition in self._partitions
        }
        try:
            reply: Any = await self._redis.xreadgroup(GROUP, self._worker_id, streams, count=count, block=block_ms)
        except ResponseError as exc:
            if "NOGROUP" not in str(exc):
                raise
            # Somebody flushed Redis under us: begin again from nothing.
            for stream in streams:
                await self._create_group(stream)
            return []
        return [claim for stream, entries in reply or () for claim in await self._accept(stream.decode(), entries)]

    async def reclaim(self, count: int) -> list[Claim]:
        """Up to `count` entries whose worker has been silent for a lease, or has handed them back."""
        claims: list[Claim] = []
        for partition in self._partitions:
            for priority in Priority:
                if len(claims) >= count:
                    return claims
                stream = self._keys.jobs(self._queue, partition, priority)
                reply: Any = await self._redis.xautoclaim(
                    stream, GROUP, self._worker_id, self._lease_ms, count=count - len(claims)
                )
                # Redis 6.2 answers (None, None) for an entry that was deleted without being acknowledged.
                entries = [(entry, fields) for entry, fields in reply[1] if entry is not None]
                claims += await self._accept(stream, entries)
        return claims

    async def _accept(self, stream: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> list[Claim]:
        """The entries that name a job of this queue; the others are buried."""
        claims = []
        for entry, fields in entries:
            entry_id = entry.decode()
            try:
                job_id = JobId.parse(fields.get(b"id", b"").decode("ascii", "replace"))
                if job_id.queue != self._queue or not stream.startswith(self._stream_prefix(job_id)):
                    raise InvalidRequest(f"the job belongs to queue {job_id.queue!r}, partition {job_id.partition}")
            except InvalidRequest as exc:
                await self._bury(stream, entry_id, fields, str(exc))
                continue
            claims.append(Claim(str(job_id), stream, entry_id))
        return claims

    def _stream_prefix(self, job_id: JobId) -> str:
        return self._keys.jobs(job_id.queue, job_id.partition, Priority.BULK).removesuffix(Priority.BULK.value)

    async def begin(self, claim: Claim) -> Begun | None:
        """Start an attempt; None when the job needs none (ended, cancelled, expired, or never was one)."""
        try:
            outcome = await self._scripts.start(claim, self._worker_id)
        except (ResponseError, ValueError, LookupError) as exc:  # it holds what no client writes
            await self._give_up(claim, f"not a job's hash: {exc}")
            return None
        if isinstance(outcome, Attempt):
            published = await self._published(claim.job_id) if outcome.generated else []
            if len(published) == outcome.generated:
                return Begun(claim, outcome, published)
            held = f"{outcome.generated} tokens by its hash, {len(published)} by its events"
            await self._give_up(claim, f"not a job's events: {held}")
        elif outcome == "gone":
            await self._give_up(claim, "there is no such job")
        return None

    async def _give_up(self, claim: Claim, reason: str) -> None:
        await self._bury(claim.stream, claim.entry_id, {b"id": claim.job_id.encode()}, reason)

    async def _published(self, job_id: str) -> list[int]:
        tokens: list[int] = []
        entries: Any = await self._redis.xrange(self._keys.of_job(job_id).events)
        for _, fields in entries:
            try:
                event = codec.decode_event(fields[b"e"])
            except (KeyError, ProtocolError):
                log.warning("job.bad_event id=%s", job_id)
                continue
            if isinstance(event, Tokens) and event.offset == len(tokens):
                tokens.extend(event.tokens)
        return tokens

    async def close(self) -> None:
        """Give up what was claimed and never started, and take this consumer out of the groups."""
        for partition in self._partitions:
            for priority in Priority:
                await self._leave_group(self._keys.jobs(self._queue, partition, priority))

    async def _leave_group(self, stream: str) -> None:
        pending: Any = await self._redis.xpending_range(
            stream, GROUP, min="-", max="+", count=MAX_CLAIMED, consumername=self._worker_id
        )
        entries = [item["message_id"] for item in pending]
        if entries:
            await self._redis.xclaim(stream, GROUP, HANDED_BACK, 0, entries, idle=NEVER_RENEWED_MS, justid=True)
        if len(entries) < MAX_CLAIMED:  # deleting a consumer deletes what is pending with it
            await self._redis.xgroup_delconsumer(stream, GROUP, self._worker_id)

    async def _bury(self, stream: str, entry_id: str, fields: dict[bytes, bytes], reason: str) -> None:
        """Keep a trace of an entry that is no job, and take it out of the queue."""
        partition = int(stream.partition("}")[0].rpartition(":")[2])
        log.warning("entry.buried stream=%s entry=%s reason=%s", stream, entry_id, reason)
        held = repr(fields)[:MAX_DEAD_BYTES]
        trace: dict[Any, Any] = {"stream": stream, "entry": entry_id, "reason": reason, "held": held}
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(self._keys.dead(self._queue, partition), trace, maxlen=MAX_DEAD)
            pipe.xack(stream, GROUP, entry_id)
            pipe.xdel(stream, entry_id)
            await pipe.execute()
