"""The Lua scripts: one atomic step of a job's way each, and a typed function in front of each.

Every script may run twice without harm, because redis-py sends a command again when a connection breaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import Event, Finished
from llamaq.common.protocol.job_outcome import FinishReason, JobStats
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import GROUP, JobId, Keys

if TYPE_CHECKING:
    from redis.asyncio import Redis

NEVER_RENEWED_MS = 10**12
"""An idle time longer than any lease."""

HANDED_BACK = "handed-back"
"""The consumer that holds entries which a stopping worker gave up, until another worker takes them."""

MAX_DEAD = 1000
"""Entries kept in a partition's stream of dead letters, about."""

DEAD_TTL_S = 7 * 24 * 3600
"""So long at least a job in the dead letters is kept with its request and what it generated."""

FlushCode = Literal["ok", "cancel", "lost"]


@cache
def source(name: str) -> str:
    """The text of one script, with the shared functions in front."""
    folder = files(__package__)
    return folder.joinpath("_lib.lua").read_text() + "\n" + folder.joinpath(f"{name}.lua").read_text()


@dataclass(frozen=True, slots=True)
class Submitted:
    """`existing` is true when the idempotency key had a job already, which `job_id` then names."""

    job_id: str
    existing: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The queue is full."""

    depth: int
    max_queue: int


@dataclass(frozen=True, slots=True)
class Claim:
    """An entry that a worker has read from a job stream."""

    job_id: str
    stream: str
    entry_id: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """A job has been started: `number` is its fence, `generated` the tokens that earlier attempts stored."""

    number: int
    request: bytes
    generated: int
    queue_ms: float


StartCode = Literal["gone", "done", "ended"]

SettleCode = Literal["ok", "suspect", "dead", "stale"]


@dataclass(frozen=True, slots=True)
class Increment:
    """What one job has to flush: `count` tokens from `offset` on, as a packed event; b"" for nothing new."""

    job_id: str
    attempt: int
    stream: str
    entry_id: str
    offset: int
    count: int
    payload: bytes
    publish: bool = True
    """False: the event is stored, and nobody who listens hears of it."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """The answer for one job: how many tokens Redis has now, and how many subscribers listen."""

    code: FlushCode
    stored: int
    listeners: int
    refusal: str = ""
    """What Redis said when it took no write; "" when it did, or had none to take."""


@dataclass(frozen=True, slots=True)
class TerminalWrite:
    """How a job ends: the terminal event and the fields of the hash that keep it."""

    event: Event
    fields: Mapping[str, bytes | str]

    @property
    def status(self) -> str:
        return "finished" if isinstance(self.event, Finished) else "failed"


def ended_early(reason: FinishReason) -> bytes:
    """The terminal event of a job that never ran."""
    return codec.encode_event(Finished(finish_reason=reason, stats=JobStats()))


class Scripts:
    """All scripts on one connection pool."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._keys = keys
        self._submit, self._start, self._flush, self._finish, self._cancel, self._requeue = (
            redis.register_script(source(name)) for name in ("submit", "start", "flush", "finish", "cancel", "requeue")
        )
        self._settle, self._purge = (redis.register_script(source(name)) for name in ("settle", "purge"))

    async def submit(
        self, job_id: JobId, request: JobRequest, payload: bytes, *, result_ttl_s: float
    ) -> Submitted | Refused:
        """Put a job into its queue."""
        key = request.idempotency_key
        keys = self._keys.of_job(str(job_id))
        streams = {Priority.INTERACTIVE: keys.interactive, Priority.BULK: keys.bulk}
        reply = await self._submit(
            keys=[
                keys.job,
                streams.pop(request.priority),
                *streams.values(),
                self._keys.config(job_id.queue, job_id.partition),
                self._keys.idempotency(job_id.queue, job_id.partition, key or ""),
            ],
            args=[
                str(job_id),
                payload,
                request.priority.value,
                GROUP,
                max(1, int(result_ttl_s * 1000)),
                "1" if key is not None else "0",
                max(1, int(request.queue_timeout_s * 1000)) if request.queue_timeout_s else 0,
            ],
        )
        if reply[0] == b"full":
            return Refused(int(reply[1]), int(reply[2]))
        return Submitted(reply[1].decode(), existing=reply[0] == b"same")

    async def settle(
        self, claim: Claim, worker: str, *, had: str, heartbeat_ms: int, dead_after_s: float, max_crashes: int
    ) -> SettleCode:
        """Settle what the last worker of a job left behind, when `worker` has taken the job over: did it die of it?

        `had` is the worker that ran it, "" for none, and `heartbeat_ms` when that one was last heard of (0: it is not
        listed); it is dead when that is `dead_after_s` ago. At `max_crashes` deaths in a row the job ends, and before
        the last of them it is a suspect. So that it had one start alone, two are the least, also where 1 is said.
        """
        keys = self._keys.of_job(claim.job_id)
        job_id = JobId.parse(claim.job_id)
        reply = await self._settle(
            keys=[keys.job, keys.events, claim.stream, self._keys.dead(job_id.queue, job_id.partition)],
            args=[
                claim.entry_id,
                GROUP,
                keys.channel,
                claim.job_id,
                worker,
                had,
                heartbeat_ms,
                int(dead_after_s * 1000),
                max(1, max_crashes - 1),
                DEAD_TTL_S * 1000,
                MAX_DEAD,
            ],
        )
        code: SettleCode = reply.decode()
        return code

    async def start(self, claim: Claim, worker: str) -> Attempt | StartCode:
        """Begin an attempt of a claimed job."""
        keys = self._keys.of_job(claim.job_id)
        reply: list[Any] = await self._start(
            keys=[keys.job, keys.events, claim.stream],
            args=[
                claim.entry_id,
                GROUP,
                worker,
                keys.channel,
                ended_early(FinishReason.CANCELLED),
                ended_early(FinishReason.DEADLINE),
            ],
        )
        if reply[0] == b"run":
            return Attempt(int(reply[1]), reply[2], int(reply[3]), float(reply[4]))
        code: StartCode = reply[0].decode()
        return code

    async def flush(self, worker: str, increments: Sequence[Increment], *, renew: bool) -> list[Flushed]:
        """Store and publish the increments of jobs of one partition; with `renew` their leases are renewed."""
        keys: list[str] = []
        values: list[int | str | bytes] = []
        for item in increments:
            of_job = self._keys.of_job(item.job_id)
            keys += [of_job.job, of_job.events, item.stream]
            values += [item.attempt, item.entry_id, of_job.channel, item.offset, item.count, item.payload]
            values.append(item.publish)
        args = [GROUP, worker, "1" if renew else "0", codec.encode_values(values)]
        reply = await self._flush(keys=keys, args=args)
        return [
            Flushed(code.decode(), int(stored), int(listeners), refusal.decode())
            for code, stored, listeners, refusal in zip(*(reply[place::4] for place in range(4)), strict=True)
        ]

    async def finish(self, last: Increment, ending: TerminalWrite) -> int | Literal["ok", "lost"]:
        """End a job. A number is how many tokens Redis has: send the last increment again from there."""
        keys = self._keys.of_job(last.job_id)
        fields = [part for pair in ending.fields.items() for part in pair]
        reply = await self._finish(
            keys=[keys.job, keys.events, last.stream],
            args=[
                last.attempt,
                GROUP,
                last.entry_id,
                keys.channel,
                last.offset,
                last.count,
                last.payload,
                codec.encode_event(ending.event),
                ending.status,
                *fields,
            ],
        )
        if reply[0] == b"resend":
            return int(reply[1])
        return "ok" if reply[0] == b"ok" else "lost"

    async def cancel(self, job_id: str) -> Literal["gone", "done", "cancelled", "requested"]:
        """Cancel a job, waiting or running."""
        keys = self._keys.of_job(job_id)
        reply = await self._cancel(
            keys=[keys.job, keys.events, keys.interactive, keys.bulk],
            args=[GROUP, keys.channel, ended_early(FinishReason.CANCELLED)],
        )
        code: Literal["gone", "done", "cancelled", "requested"] = reply.decode()
        return code

    async def requeue(self, claim: Claim, attempt: int | None, *, crashed: str = "") -> bool:
        """Hand a job back; `attempt` is None when it was not started. False when it was lost already.

        `crashed` is the worker that hands it back because something went wrong there: that is a death.
        """
        reply = await self._requeue(
            keys=[self._keys.of_job(claim.job_id).job, claim.stream],
            args=["" if attempt is None else attempt, GROUP, claim.entry_id, NEVER_RENEWED_MS, HANDED_BACK, crashed],
        )
        return bool(reply == b"ok")

    async def purge(self, queue: str, partition: int, entry: str, job_id: str | None) -> bool:
        """Take a dead letter out; `job_id` is None where it names no job. False when it was out already."""
        keys = [self._keys.dead(queue, partition)]
        if job_id is not None:
            of_job = self._keys.of_job(job_id)
            keys += [of_job.job, of_job.events]
        return bool(await self._purge(keys=keys, args=[entry]))
