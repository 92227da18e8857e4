"""The Lua scripts, and a typed function for each. Each script is one atomic step in the life of a job.

Every script may run twice without harm, because redis-py sends a command again when its connection breaks. The opening
comment of each Lua file lists its keys, arguments and return values.
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

# Idle time that is set on the entry of a requeued job. It is longer than any lease, so the next worker claims the entry
# at once.
EXPIRED_IDLE_MS = 10**12

# The consumer that owns the entries of requeued jobs until a worker claims them.
REQUEUED_CONSUMER = "handed-back"

# Approximate number of dead letters that are stored in each partition.
MAX_DEAD = 1000

# A dead job is stored for at least this time, so that an operator can examine and retry it.
DEAD_TTL_S = 7 * 24 * 3600

StartCode = Literal["gone", "done", "ended"]
"""Why no attempt was started; start.lua explains the values."""
FlushCode = Literal["ok", "cancel", "lost"]
"""What a worker must do with a job after a flush; flush.lua explains the values."""
CancelCode = Literal["gone", "done", "cancelled", "requested"]
"""The effect of a call of `cancel`; cancel.lua explains the values."""
CrashVerdict = Literal["ok", "suspect", "dead", "stale"]
"""What a worker must do with a reclaimed job; check_crash.lua explains the values."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The reply to an accepted submit.

    Attributes:
        job_id: Id of the job.
        existing: Whether an earlier job has the same idempotency key. Then `job_id` names the earlier job.
    """

    job_id: str
    existing: bool


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    """The reply to a submit into a full queue.

    Attributes:
        depth: Number of waiting jobs in the partition.
        max_queue: Number of waiting jobs that the workers allow.
    """

    depth: int
    max_queue: int


@dataclass(frozen=True, slots=True)
class Claim:
    """An entry of a job stream that a worker has claimed."""

    job_id: str
    stream: str
    entry_id: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that was started.

    Attributes:
        number: Number of the attempt. Every write contains it; Redis refuses writes of older attempts.
        request: The encoded request.
        generated: Number of tokens that earlier attempts stored.
        queue_ms: Milliseconds from submit to the start of the first attempt.
    """

    number: int
    request: bytes
    generated: int
    queue_ms: float


@dataclass(frozen=True, slots=True)
class Increment:
    """The tokens that one job generated since its last flush.

    Attributes:
        job_id: Id of the job.
        attempt: Number of the attempt.
        stream: Job stream that the job was claimed from.
        entry_id: Id of the job's entry in that stream.
        offset: Number of tokens of the job before the first token of this increment.
        count: Number of tokens in this increment.
        payload: The encoded event `tokens`; empty if there are no new tokens.
        publish: Whether subscribers receive the event. False: it is only stored.
    """

    job_id: str
    attempt: int
    stream: str
    entry_id: str
    offset: int
    count: int
    payload: bytes
    publish: bool = True


@dataclass(frozen=True, slots=True)
class FlushReply:
    """The reply to the increment of one job.

    Attributes:
        code: What the worker must do with the job.
        stored: Number of tokens of the job that Redis has now.
        listeners: Number of subscribers of the job.
        refusal: Error text of Redis if it refused to store the event; otherwise empty.
    """

    code: FlushCode
    stored: int
    listeners: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class TerminalWrite:
    """The last write to a job.

    Attributes:
        event: The terminal event, `Finished` or `Failed`.
        fields: Fields of the job's hash that store the result or the error.
    """

    event: Event
    fields: Mapping[str, bytes | str]

    @property
    def status(self) -> str:
        return "finished" if isinstance(self.event, Finished) else "failed"


@cache
def source(name: str) -> str:
    """Return the text of a script, with the shared functions in front of it."""
    folder = files(__package__) / "scripts"
    return folder.joinpath("_lib.lua").read_text() + "\n" + folder.joinpath(f"{name}.lua").read_text()


def finished_without_run(reason: FinishReason) -> bytes:
    """Return the encoded terminal event of a job that ends before it runs."""
    return codec.encode_event(Finished(finish_reason=reason, stats=JobStats()))


class Scripts:
    """All scripts on one connection pool. Every method raises `RedisError` if Redis cannot execute the script."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._keys = keys
        self._submit, self._start, self._flush, self._finish, self._cancel, self._requeue = (
            redis.register_script(source(name)) for name in ("submit", "start", "flush", "finish", "cancel", "requeue")
        )
        self._check_crash, self._purge_dead_letter = (
            redis.register_script(source(name)) for name in ("check_crash", "purge_dead_letter")
        )

    async def submit(
        self, job_id: JobId, request: JobRequest, payload: bytes, *, result_ttl_s: float
    ) -> Submitted | SubmitRefused:
        """Put a job into its queue.

        Args:
            job_id: Id of the new job.
            request: The request.
            payload: The same request, encoded.
            result_ttl_s: How long Redis stores the result after the end of the job, in seconds.
        """
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
            return SubmitRefused(int(reply[1]), int(reply[2]))
        return Submitted(reply[1].decode(), existing=reply[0] == b"same")

    async def check_crash(
        self, claim: Claim, worker: str, *, last_worker: str, heartbeat_ms: int, dead_after_s: float, max_crashes: int
    ) -> CrashVerdict:
        """Check whether the last worker of a job died while it ran the job, and count the death.

        Args:
            claim: The entry, which `worker` has claimed from another worker.
            worker: Id of the worker that will start the job.
            last_worker: Id of the worker that ran the job last; empty: none.
            heartbeat_ms: Time of the last worker's last heartbeat, in milliseconds since the epoch; 0: none.
            dead_after_s: Age of a heartbeat, in seconds, from which its worker counts as dead.
            max_crashes: Number of deaths in a row that end the job. A job with one death fewer is a suspect, which runs
                only while no other job runs. At least two deaths are required, so that every job runs once as a
                suspect.
        """
        keys = self._keys.of_job(claim.job_id)
        job_id = JobId.parse(claim.job_id)
        reply = await self._check_crash(
            keys=[keys.job, keys.events, claim.stream, self._keys.dead(job_id.queue, job_id.partition)],
            args=[
                claim.entry_id,
                GROUP,
                keys.channel,
                claim.job_id,
                worker,
                last_worker,
                heartbeat_ms,
                int(dead_after_s * 1000),
                max(1, max_crashes - 1),
                DEAD_TTL_S * 1000,
                MAX_DEAD,
            ],
        )
        verdict: CrashVerdict = reply.decode()
        return verdict

    async def start(self, claim: Claim, worker: str) -> Attempt | StartCode:
        """Start an attempt of a claimed job. Returns a code if no attempt was started."""
        keys = self._keys.of_job(claim.job_id)
        reply: list[Any] = await self._start(
            keys=[keys.job, keys.events, claim.stream],
            args=[
                claim.entry_id,
                GROUP,
                worker,
                keys.channel,
                finished_without_run(FinishReason.CANCELLED),
                finished_without_run(FinishReason.DEADLINE),
            ],
        )
        if reply[0] == b"run":
            return Attempt(int(reply[1]), reply[2], int(reply[3]), float(reply[4]))
        code: StartCode = reply[0].decode()
        return code

    async def flush(self, worker: str, increments: Sequence[Increment], *, renew: bool) -> list[FlushReply]:
        """Store and publish the increments of jobs of one partition.

        Args:
            worker: Id of the worker that runs the jobs.
            increments: One increment for each job.
            renew: Whether to renew the leases of the jobs.

        Returns:
            One reply for each increment, in the same order.
        """
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
            FlushReply(code.decode(), int(stored), int(listeners), refusal.decode())
            for code, stored, listeners, refusal in zip(*(reply[place::4] for place in range(4)), strict=True)
        ]

    async def finish(self, last: Increment, terminal_write: TerminalWrite) -> int | Literal["ok", "lost"]:
        """End a job with its last increment.

        Returns:
            `ok`: the job has ended. `lost`: a newer attempt exists, or the job had already ended. A number: the job
            has not ended, because Redis has this number of tokens and not `last.offset`. Then call again with an
            increment that begins after these tokens.
        """
        keys = self._keys.of_job(last.job_id)
        fields = [part for pair in terminal_write.fields.items() for part in pair]
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
                codec.encode_event(terminal_write.event),
                terminal_write.status,
                *fields,
            ],
        )
        if reply[0] == b"resend":
            return int(reply[1])
        return "ok" if reply[0] == b"ok" else "lost"

    async def cancel(self, job_id: str) -> CancelCode:
        """Cancel a waiting or running job."""
        keys = self._keys.of_job(job_id)
        reply = await self._cancel(
            keys=[keys.job, keys.events, keys.interactive, keys.bulk],
            args=[GROUP, keys.channel, finished_without_run(FinishReason.CANCELLED)],
        )
        code: CancelCode = reply.decode()
        return code

    async def requeue(self, claim: Claim, attempt: int | None, *, crashed: str = "") -> bool:
        """Requeue a claimed job, so that another worker can claim it at once.

        Args:
            claim: The entry of the job.
            attempt: Number of the worker's attempt. None: the job was not started.
            crashed: Id of the worker if it crashed; this counts as a death. Empty: the worker did not crash.

        Returns:
            Whether the job was requeued. False: a newer attempt exists, or the job has ended.
        """
        reply = await self._requeue(
            keys=[self._keys.of_job(claim.job_id).job, claim.stream],
            args=[
                "" if attempt is None else attempt,
                GROUP,
                claim.entry_id,
                EXPIRED_IDLE_MS,
                REQUEUED_CONSUMER,
                crashed,
            ],
        )
        return bool(reply == b"ok")

    async def purge(self, queue: str, partition: int, entry: str, job_id: str | None) -> bool:
        """Delete a dead letter.

        Args:
            queue: Name of the queue.
            partition: Partition of the dead letter.
            entry: Id of the dead letter in the partition's stream.
            job_id: Id of the job of the dead letter. None: the dead letter names no job.

        Returns:
            Whether the dead letter existed.
        """
        keys = [self._keys.dead(queue, partition)]
        if job_id is not None:
            of_job = self._keys.of_job(job_id)
            keys += [of_job.job, of_job.events]
        return bool(await self._purge_dead_letter(keys=keys, args=[entry]))
