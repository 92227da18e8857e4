"""Stores batches in Redis. A script checks before each write of a server that this server runs the batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llamaq.common.errors import InvalidRequest, LlamaqError, ProtocolError
from llamaq.common.protocol.keys import Keys
from llamaq.common.redis.server_state import server_time_ms
from llamaq.common.redis.write_refusals import is_job_key_error
from llamaq.gateway.batches.record import Batch, BatchRequest, BatchStatus, batch_object, missing_batch
from llamaq.gateway.http.query_parameters import Page
from llamaq.gateway.http_keys import HttpKeys

KEPT_S = 30 * 24 * 3600
"""How long an ended batch can be read."""
MAX_BATCHES = 10_000
"""Largest number of batches of an API key that are listed."""
READ_AT_ONCE = 100
"""Number of batches that are read together to fill a page."""

ClaimCode = Literal["mine", "held", "ended", "missing"]


class LeaseLost(LlamaqError):
    """Another server runs the batch now."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The reply to a claim."""

    code: ClaimCode
    status: str
    """State of the batch. Empty: there is none."""
    until_ms: int
    """End of the lease, in milliseconds since the epoch."""


class BatchStore:
    """The batches of one Redis."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis = redis
        self.keys = HttpKeys(keys.prefix)
        names = ("claim", "write", "advance", "cancel")
        self._scripts = {
            name: redis.register_script(files(__package__).joinpath(f"{name}.lua").read_text()) for name in names
        }

    def __repr__(self) -> str:
        return f"<BatchStore {self.keys.prefix}>"

    async def create(self, request: BatchRequest) -> Batch:
        """Store a new batch. A server will run it. If there is a batch with this id, nothing changes.

        Returns:
            The stored batch. Its request may differ from `request` only if the id was derived from a key of the client.
        """
        key, mine = self.keys.http_batch(request.id), self.keys.http_batches(request.owner or "")
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.hsetnx(key, "request", request.model_dump_json())
            pipe.hsetnx(key, "status", BatchStatus.VALIDATING.value)
            pipe.hgetall(key)
            pipe.expireat(key, request.expires_s + KEPT_S)
            pipe.zadd(mine, {request.id: request.created_ms}, nx=True)
            pipe.zremrangebyrank(mine, 0, -MAX_BATCHES - 1)
            pipe.expire(mine, 3 * KEPT_S)  # longer than any batch is stored
            replies: Any = await pipe.execute()
        # After the pipeline, because a server that finds no batch under the id forgets the id.
        await self._open(request)
        return _batch_of(request.id, replies[2])

    async def reopen(self, batch: Batch) -> bool:
        """Let a server run a batch that no server knows of, because a server was killed within `create`.

        Returns:
            Whether no server knew of the batch. A batch that has ended stays as it is. If it ends at this moment, the
            next `claim` forgets it.
        """
        if batch.status.has_ended:
            return False
        if await self.redis.zscore(self.keys.http_open_batches(), batch.request.id) is not None:
            return False  # the usual case: a client that polls writes nothing, also while Redis is full
        return await self._open(batch.request)

    async def _open(self, request: BatchRequest) -> bool:
        """Remember that a batch has to be run. Return False if this is known: the batch keeps its place.

        The batch is due at once, also if the clock of the server that created it is ahead of the clock of Redis.
        """
        since_ms = min(request.created_ms, await server_time_ms(self.redis, self.keys.http_open_batches()))
        return bool(await self.redis.zadd(self.keys.http_open_batches(), {request.id: since_ms}, nx=True))

    async def read(self, batch_id: str) -> Batch | None:
        """Return a batch. None: there is none.

        Raises:
            ProtocolError: Another client of Redis has damaged it.
        """
        stored: Any = await self.redis.hgetall(self.keys.http_batch(batch_id))
        return _batch_of(batch_id, stored) if stored else None

    async def find(self, batch_id: str, owner: str | None) -> Batch:
        """Return a batch of an API key.

        Raises:
            RequestRefused: The key has no such batch: 404.
        """
        try:
            batch = await self.read(batch_id)
        except InvalidRequest as exc:
            raise missing_batch(batch_id) from exc
        if batch is None or batch.request.owner != owner:
            raise missing_batch(batch_id)
        return batch

    async def listed(self, owner: str | None, page: Page) -> tuple[list[Batch], bool]:
        """Return batches of an API key, and whether there are more. Damaged ones are left out.

        Ids of batches that are stored no longer are removed from the list, except `after`.

        Args:
            owner: Name of the API key. None: the server requires none.
            page: Which part of the list is wanted.

        Raises:
            RequestRefused: The key has no batch `after`.
        """
        mine, start = self.keys.http_batches(owner or ""), 0
        if page.after is not None:
            rank_of = self.redis.zrank if page.is_ascending else self.redis.zrevrank
            rank: Any = await rank_of(mine, page.after)
            if rank is None:
                raise missing_batch(page.after)
            start = rank + 1
        batches: list[Batch] = []
        n_read = page.limit + 1
        while len(batches) <= page.limit:
            ids: Any = await self.redis.zrange(mine, start, start + n_read - 1, desc=not page.is_ascending)
            if not ids:
                break
            start += len(ids) - await self._add_stored(batches, mine, ids)
            n_read = READ_AT_ONCE  # thousands of batches may be stored no longer
        return batches[: page.limit], len(batches) > page.limit

    async def _add_stored(self, batches: list[Batch], mine: str, ids: Sequence[bytes]) -> int:
        """Add the batches with these ids, and remove the other ids from the list `mine`. Return their number."""
        async with self.redis.pipeline(transaction=False) as pipe:
            for batch_id in ids:
                pipe.hgetall(self.keys.http_batch(batch_id.decode()))
            found: Any = await pipe.execute()
        gone = [batch_id for batch_id, stored in zip(ids, found, strict=True) if not stored]
        if gone:
            await self.redis.zrem(mine, *gone)
        for batch_id, stored in zip(ids, found, strict=True):
            with suppress(ProtocolError):
                batches += [_batch_of(batch_id.decode(), stored)] if stored else []
        return len(gone)

    async def cancel(self, batch_id: str) -> None:
        """Let the runner of a batch cancel it. A batch that has ended stays as it is.

        A batch without a runner is due before others that wait. The next `claim` forgets a batch that has ended.
        """
        await self._scripts["cancel"](keys=[self.keys.http_batch(batch_id)], args=[int(time.time())])
        await self.redis.zadd(self.keys.http_open_batches(), {batch_id: 0})

    async def due(self, count: int, longest_s: float) -> Sequence[str]:
        """Return batches that a server may claim. The batch that has waited longest is first.

        The last ones are due only after more than twice `longest_s`. Their time may have been stored before the clock
        of Redis was set back. `claim` tells whether another server runs them. What another client of Redis has
        written instead of an id is removed.

        Args:
            count: Number of batches at most, of each kind.
            longest_s: Seconds for which this server claims or postpones a batch at most.
        """
        now_ms = await server_time_ms(self.redis, self.keys.http_open_batches())
        key, latest_ms = self.keys.http_open_batches(), now_ms + int(2000 * longest_s)
        members: Any = await self.redis.zrangebyscore(key, "-inf", now_ms, 0, count)
        later: Any = await self.redis.zrangebyscore(key, f"({latest_ms}", "+inf", 0, count)
        found = []
        for member in members + later:
            try:
                self.keys.http_batch(batch_id := member.decode(errors="replace"))
            except InvalidRequest:
                await self.redis.zrem(self.keys.http_open_batches(), member)
            else:
                found.append(batch_id)
        return found

    async def claim(self, batch_id: str, runner: str, lease_s: float) -> Claim:
        """Make a server the runner of a batch if no other server runs it, or renew the server's lease.

        Args:
            batch_id: The batch.
            runner: Id of the server.
            lease_s: Seconds until the lease ends. 0 releases the batch: another server may claim it now.
        """
        lease_ms = int(lease_s * 1000)
        try:
            reply: Any = await self._scripts["claim"](keys=[self.keys.http_batch(batch_id)], args=[runner, lease_ms])
        except ResponseError as exc:
            if not is_job_key_error(exc):
                raise
            reply = b"missing", b"", 0  # another client has overwritten it
        claim = Claim(reply[0].decode(), reply[1].decode(), int(reply[2]))
        if claim.code in ("ended", "missing"):
            await self.close(batch_id)
        elif lease_ms:  # a released batch keeps its place
            await self.redis.zadd(self.keys.http_open_batches(), {batch_id: claim.until_ms}, xx=True)
        return claim

    async def postpone(self, batch_id: str, delay_s: float) -> None:
        """Prevent for some time that servers examine a batch."""
        due_ms = await server_time_ms(self.redis, self.keys.http_open_batches()) + int(delay_s * 1000)
        await self.redis.zadd(self.keys.http_open_batches(), {batch_id: due_ms}, xx=True)

    async def close(self, batch_id: str) -> None:
        """Forget that a batch has to be run."""
        await self.redis.zrem(self.keys.http_open_batches(), batch_id)

    async def take_turn(self, owner: str, batch_id: str, lease_s: float) -> bool:
        """Return whether a batch of an API key may run, because no other batch of this key runs. A call renews this
        right.
        """
        key, lease_ms = self.keys.http_turn(owner), int(lease_s * 1000)
        if await self.redis.set(key, batch_id, nx=True, px=lease_ms):
            return True
        holder: Any = await self.redis.get(key)
        if holder != batch_id.encode():
            return False
        return bool(await self.redis.pexpire(key, lease_ms))

    async def release_turn(self, owner: str, batch_id: str) -> None:
        """Let the next batch of an API key run."""
        key = self.keys.http_turn(owner)
        if await self.redis.get(key) == batch_id.encode():
            await self.redis.delete(key)

    async def advance(
        self, request: BatchRequest, runner: str, status: BatchStatus, **fields: str | int
    ) -> BatchStatus:
        """Set the status of a batch, and other fields. Return the status: a cancelled batch stays `cancelling`.

        Raises:
            LeaseLost: Another server runs the batch.
        """
        ttl_s = KEPT_S if status.has_ended else 0
        pairs = [part for pair in fields.items() for part in pair]
        reply: Any = await self._scripts["advance"](
            keys=[self.keys.http_batch(request.id)], args=[runner, status.value, int(time.time()), ttl_s, *pairs]
        )
        if not reply:
            raise LeaseLost(request.id)
        return BatchStatus(reply.decode())

    async def write(
        self,
        request: BatchRequest,
        runner: str,
        *,
        n_before: int,
        output: Sequence[bytes],
        errors: Sequence[bytes],
        counters: Mapping[str, int],
    ) -> None:
        """Append blocks to the files of a batch, and add to its counters. A repeated call changes nothing.

        Args:
            request: The batch.
            runner: Id of the server.
            n_before: Number of calls before this one, by all servers.
            output: Blocks of the output file.
            errors: Blocks of the error file.
            counters: What is added to each counter.

        Raises:
            LeaseLost: Another server runs the batch.
        """
        keys = [self.keys.http_batch(request.id)]
        keys += [self.keys.http_file(file_id) for file_id in (request.output_file_id, request.error_file_id)]
        pairs = [part for pair in counters.items() for part in pair]
        expires_s = request.expires_s + KEPT_S
        args = [runner, n_before, expires_s, len(output), len(pairs), *pairs, *output, *errors]
        reply: Any = await self._scripts["write"](keys=keys, args=args)
        if int(reply) != n_before + 1:
            raise LeaseLost(request.id)


def _batch_of(batch_id: str, stored: Mapping[bytes, bytes]) -> Batch:
    """Return a batch.

    Raises:
        ProtocolError: Another client of Redis has damaged it.
    """
    try:
        fields = {name.decode(): value.decode() for name, value in stored.items()}
        batch = Batch(BatchRequest.model_validate_json(fields.pop("request")), fields)
        batch_object(batch)  # reads every field
    except (ValueError, KeyError) as exc:
        raise ProtocolError(f"the record of batch {batch_id!r} in Redis is damaged: {type(exc).__name__}") from exc
    return batch
