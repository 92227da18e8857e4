"""From Redis into the worker: claim entries of the job streams, take over lost ones, begin attempts, bury garbage."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Tokens
from llamaq.common.protocol.job_request import Priority
from llamaq.common.protocol.keys import GROUP, JobId, Keys
from llamaq.common.protocol.scripts import MAX_DEAD, Attempt, Claim, Scripts, SettleCode
from llamaq.common.redis.redis_errors import is_unable
from llamaq.worker.broker.job_streams import Entries, JobStreams

log = logging.getLogger(__name__)

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
        self, redis: Redis, keys: Keys, *, queue: str, partitions: int, worker_id: str, lease_s: float, max_crashes: int
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._scripts = Scripts(redis, keys)
        self._queue = queue
        self._partitions = range(partitions)
        self._streams = JobStreams(redis, keys, queue=queue, partitions=partitions, consumer=worker_id)
        self._worker_id = worker_id
        self._lease_ms = int(lease_s * 1000)
        self._max_crashes = max_crashes

    async def open(self, *, max_queue: int) -> None:
        """Make the consumer groups, and tell submitters the bound of the queue."""
        await self._streams.open()
        for partition in self._partitions:
            await self._redis.hset(self._keys.config(self._queue, partition), "max_queue", str(max_queue))

    async def claim(self, count: int, *, block_s: float) -> list[Claim]:
        """Up to `count` new entries, interactive ones first; waits up to `block_s` for the first.

        While it waits, several streams may each give one at the same moment. With the partitions of a cluster it may
        also return early with none.
        """
        return await self._accept_all(await self._streams.read(count) or await self._streams.wait(block_s))

    async def claim_urgent(self, count: int) -> list[Claim]:
        """Up to `count` new interactive entries; does not wait for any."""
        return await self._accept_all(await self._streams.read(count, [Priority.INTERACTIVE]))

    async def reclaim(self, count: int) -> list[Claim]:
        """Up to `count` entries whose worker has been silent for a lease, or has handed them back."""
        return await self._accept_all(await self._streams.reclaim(count, self._lease_ms))

    async def _accept_all(self, found: Entries) -> list[Claim]:
        return [claim for stream, entries in found for claim in await self._accept(stream, entries)]

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

    async def settle(self, claim: Claim) -> SettleCode:
        """Settle what the last worker of a reclaimed job left behind: see `settle.lua`.

        That worker's heartbeats tell a death from a lease that was lost without one. A lease is renewed three times
        before it is over, so a worker that died has not beaten for two thirds of it, however long it stays listed; one
        that lives has within a heartbeat. The line is drawn at half a lease. A living worker whose heartbeat takes
        longer than that is blamed by mistake, and takes the blame back with its next flush.
        """
        try:
            held: Any = await self._redis.hmget(self._keys.of_job(claim.job_id).job, ["status", "worker"])
            had = held[1].decode() if held[1] and held[0] == b"running" else ""
            heartbeat_ms = await self._redis.zscore(self._keys.workers(self._queue), had) if had else None
            return await self._scripts.settle(
                claim,
                self._worker_id,
                had=had,
                heartbeat_ms=int(heartbeat_ms or 0),
                dead_after_s=self._lease_ms / 2000,
                max_crashes=self._max_crashes,
            )
        except (ResponseError, ValueError) as exc:
            if is_unable(exc):
                raise
            return "ok"  # not a job's hash: to begin it gives it up

    async def renew(self, claim: Claim) -> bool:
        """Keep a claim whose job is not begun yet; False when it is somebody else's by now."""
        entry = claim.entry_id
        ours = await self._redis.xpending_range(claim.stream, GROUP, entry, entry, 1, consumername=self._worker_id)
        if not ours:
            return False
        await self._redis.xclaim(claim.stream, GROUP, self._worker_id, 0, [claim.entry_id], justid=True)
        return True

    async def hand_back(self, claim: Claim) -> None:
        """Let another worker begin this job, at once."""
        await self._scripts.requeue(claim, None)

    async def begin(self, claim: Claim) -> Begun | None:
        """Start an attempt; None when the job needs none (ended, cancelled, expired, or never was one)."""
        try:
            outcome = await self._scripts.start(claim, self._worker_id)
        except (ResponseError, ValueError, LookupError) as exc:
            if is_unable(exc):
                raise  # the job is as good as any
            await self._give_up(claim, f"not a job's hash: {exc}")  # it holds what no client writes
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
        await self._streams.close()

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
