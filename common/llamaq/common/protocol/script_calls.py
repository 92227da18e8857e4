"""The Lua scripts, and a typed function for each. Each script is one atomic step in the life of a job.

Every script may run twice without harm, because redis-py sends a command again when its connection breaks. The opening
comment of each Lua file lists its keys, arguments and return values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError, ResponseError

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import GROUP, JobId, Keys
from llamaq.common.protocol.queue_and_worker_state import RecentJob
from llamaq.common.protocol.script_types import (
    Attempt,
    CancelCode,
    Claim,
    ClaimCode,
    CrashVerdict,
    DueJobs,
    ExpireCode,
    FlushReply,
    Increment,
    OtherKind,
    OtherPartitions,
    PriorityCode,
    StoredEnd,
    StreamEntries,
    Submission,
    SubmitConflict,
    SubmitDraining,
    SubmitRefused,
    SubmitReply,
    Submitted,
    TerminalWrite,
)
from llamaq.common.redis.write_refusals import is_job_key_error

if TYPE_CHECKING:
    from redis.asyncio import Redis

# The files with the shared functions. Each file uses only functions of the files before it.
SHARED = ("_metrics", "_turns", "_lib")
_DEFINITION = re.compile(
    r"^local (?:function (?P<name>\w+)\(.*?^end$|(?P<constant>\w+) = .*?(?=^local|^--|^$|\Z))", re.MULTILINE | re.DOTALL
)

# How long a job that waits in a worker stays there although another worker has a free slot, and the upper bound of this
# time. The time is multiplied by the `move_factor` of the job (see _lib.lua).
MOVE_AFTER_S, MAX_MOVE_AFTER_S = 1.0, 30.0

# Upper bound on the waiting entries of one stream that are examined for a worker with a free slot.
MAX_WAITING_EXAMINED = 100

# Upper bound on the jobs that one call of a script claims or ends. Meanwhile Redis executes nothing else.
MAX_JOBS_IN_CALL = 64

# Approximate number of dead letters that are stored in each partition.
MAX_DEAD = 1000

# Approximate upper bound on the ended jobs whose stats a queue stores.
MAX_STATS = 10_000

# A dead job is stored for at least this time, so that an operator can examine and retry it.
DEAD_TTL_S = 7 * 24 * 3600


def _limit_ms(limit_s: float | None) -> int:
    """Return a time in milliseconds; 0 for no limit or no delay."""
    return 0 if limit_s is None else max(1, int(limit_s * 1000))


def _submit_reply(reply: list[Any]) -> SubmitReply:
    if reply[0] == b"partitions":
        return OtherPartitions(int(reply[1]))
    if reply[0] == b"kind":
        return OtherKind(JobKind(reply[1].decode()))
    if reply[0] == b"full":
        return SubmitRefused(int(reply[1]), int(reply[2]))
    if reply[0] == b"conflict":
        return SubmitConflict(reply[1].decode())
    if reply[0] == b"draining":
        return SubmitDraining()
    return Submitted(reply[1].decode(), existing=reply[0] == b"same")


def _claim_outcome(reply: list[Any]) -> Attempt | ClaimCode | ResponseError:
    if reply[0] == b"error":
        return ResponseError(reply[1].decode(errors="replace"))
    if reply[0] != b"run":
        code: ClaimCode = reply[0].decode()
        return code
    try:
        return _attempt(*reply[1:])
    except (ValueError, TypeError) as exc:  # a field of the hash is not a number
        return ResponseError(f"the reply to the claim is damaged: {exc}")


def _attempt(
    number: int,
    request: bytes,
    generated: int,
    waited_ms: int,
    queue_ms: int,
    slot_ms: int,
    left_ms: int,
    retries_left: int,
    token_times: bytes,
) -> Attempt:
    return Attempt(
        int(number),
        request,
        int(generated),
        waited_ms=float(waited_ms),
        queue_ms=None if queue_ms < 0 else float(queue_ms),
        slot_ms=float(slot_ms),
        left_ms=None if left_ms < 0 else float(left_ms),
        retries_left=None if retries_left < 0 else int(retries_left),
        token_times=token_times.decode(errors="replace"),
    )


def _finish_outcome(reply: Any) -> bool | int | ResponseError:
    if isinstance(reply, list):
        return ResponseError(reply[1].decode(errors="replace"))
    return int(reply) if isinstance(reply, int) else bool(reply == b"ok")


def _entry(reply: list[Any]) -> tuple[bytes, dict[bytes, bytes]]:
    entry_id, fields = reply
    return entry_id, dict(zip(fields[::2], fields[1::2], strict=True))


@cache
def source(name: str) -> str:
    """Return the text of a script, with the shared functions that it needs in front of it.

    Each call of a script creates all functions in its text, so functions that are not needed would cost time. A
    function uses only functions that stand before it.
    """
    folder = files(__package__) / "scripts"
    text = folder.joinpath(f"{name}.lua").read_text()
    shared = "\n".join(folder.joinpath(f"{part}.lua").read_text() for part in SHARED)
    for found in reversed(list(_DEFINITION.finditer(shared))):
        if re.search(rf"\b{found['name'] or found['constant']}\b", text):
            text = f"{found[0].rstrip()}\n{text}"
    return text


class Scripts:
    """All scripts on one connection pool. Every method raises `RedisError` if Redis cannot execute the script."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._set_priority = redis.register_script(source("set_priority"))
        self._submit, self._claim, self._flush, self._finish, self._cancel, self._requeue = (
            redis.register_script(source(name)) for name in ("submit", "claim", "flush", "finish", "cancel", "requeue")
        )
        self._read, self._reclaim, self._movable, self._expire, self._due = (
            redis.register_script(source(name)) for name in ("read", "reclaim", "movable", "expire", "due")
        )
        self._retry, self._position, self._add_stats = (
            redis.register_script(source(name)) for name in ("retry", "position", "add_stats")
        )
        self._check_crash, self._bury, self._purge_dead_letter = (
            redis.register_script(source(name)) for name in ("check_crash", "bury", "purge_dead_letter")
        )

    async def submit(
        self,
        job_id: JobId,
        request: JobRequest,
        payload: bytes,
        *,
        result_ttl_s: float,
        event_ttl_s: float = 0.0,
        partitions: int = 0,
    ) -> SubmitReply:
        """Put a job into its queue.

        Args:
            job_id: Id of the new job.
            request: The request.
            payload: The same request, encoded.
            result_ttl_s: How long Redis stores the result after the end of the job, in seconds.
            event_ttl_s: How long Redis stores the events after the end of the job, in seconds. 0: they are deleted at
                the end. The result is complete without them.
            partitions: Number of partitions of the queue, which the script compares with that of the workers. 0: not
                known.
        """
        one = Submission(job_id, request, payload)
        return _submit_reply(await self._send_submit(one, result_ttl_s, event_ttl_s, partitions))

    async def submit_many(
        self, submissions: Sequence[Submission], *, result_ttl_s: float, event_ttl_s: float, partitions: int
    ) -> list[SubmitReply | RedisError]:
        """Put several jobs into their queues, in one round trip. The arguments are those of `submit`.

        Returns:
            The reply to each job, in order, or the error with which Redis refused it.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            for one in submissions:
                await self._send_submit(one, result_ttl_s, event_ttl_s, partitions, client=pipe)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        return [reply if isinstance(reply, RedisError) else _submit_reply(reply) for reply in replies]

    async def _send_submit(
        self,
        submission: Submission,
        result_ttl_s: float,
        event_ttl_s: float,
        partitions: int,
        *,
        client: Redis | None = None,
    ) -> Any:
        """Call `submit.lua`. With a pipeline as `client`, the call is only added to the pipeline."""
        job_id, request = submission.job_id, submission.request
        key = request.idempotency_key
        keys = self._keys.of_job(str(job_id))
        streams = {Priority.INTERACTIVE: keys.interactive, Priority.BULK: keys.bulk}
        return await self._submit(
            keys=[
                keys.job,
                streams.pop(request.priority),
                *streams.values(),
                self._keys.config(job_id.queue, job_id.partition),
                self._keys.idempotency(job_id.queue, job_id.partition, key or ""),
            ],
            args=[
                str(job_id),
                submission.payload,
                request.priority.value,
                GROUP,
                max(1, int(result_ttl_s * 1000)),
                "" if key is None else codec.digest_of(request),
                _limit_ms(request.queue_timeout_s),
                codec.encode_returned(request),
                int(event_ttl_s * 1000),
                _limit_ms(request.deadline_s),
                _limit_ms(request.timeout_s),
                partitions,
                _limit_ms(request.delay_s),
                _limit_ms(request.run_at),
                request.retries,
                request.tenant or "",
                request.kind.value,
            ],
            client=client,
        )

    async def check_crash(
        self, claim: Claim, worker: str, *, last_worker: str, heartbeat_ms: int, dead_after_s: float, max_crashes: int
    ) -> CrashVerdict:
        """Check whether the last worker of a job died with the job, and count the death.

        Args:
            claim: The entry, which `worker` has taken from another worker.
            worker: Id of the worker that will claim the job.
            last_worker: Id of the worker that claimed the job last; empty: the job is not at risk.
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

    async def bury(self, claim: Claim, worker: str, attempt: int | None, error: Failed) -> bool:
        """Fail a job whose data in Redis were damaged, and make a dead letter of it.

        Args:
            claim: The entry of the job, which `worker` has taken.
            worker: Id of the worker.
            attempt: Number of the worker's attempt. None: the job could not be claimed.
            error: The error of the job.

        Returns:
            Whether the job has ended now. False: a newer attempt exists, or the job had already ended.
        """
        keys = self._keys.of_job(claim.job_id)
        job_id = JobId.parse(claim.job_id)
        reply = await self._bury(
            keys=[keys.job, keys.events, claim.stream, self._keys.dead(job_id.queue, job_id.partition)],
            args=[
                "" if attempt is None else attempt,
                worker,
                GROUP,
                claim.entry_id,
                keys.channel,
                claim.job_id,
                error.code,
                error.message,
                DEAD_TTL_S * 1000,
                MAX_DEAD,
            ],
        )
        return bool(reply == b"ok")

    async def read(
        self, streams: Sequence[str], count: int, lease_ms: int, *, total: int | None = None
    ) -> list[tuple[str, StreamEntries]]:
        """Read new entries of job streams that are on one Redis server.

        Args:
            streams: The job streams.
            count: Number of entries to read from each stream at most.
            lease_ms: How long the caller keeps an entry without a renewal, in milliseconds.
            total: Number of entries to read from all streams together at most, from the first streams first. None: no
                such bound.
        """
        total = count * len(streams) if total is None else total
        reply = await self._read(keys=list(streams), args=[GROUP, count, lease_ms, total])
        return [(stream.decode(), [_entry(entry) for entry in entries]) for stream, entries in reply]

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
        return [_entry(entry) for entry in reply]

    async def movable_jobs(
        self, queue: str, partition: int, worker: str, count: int, *, max_crashes: int
    ) -> list[tuple[Claim, int]]:
        """Return jobs that wait for a slot in other workers, and the numbers of their attempts.

        Args:
            queue: Name of the queue.
            partition: The partition.
            worker: Id of the worker that has a free slot.
            count: Number of jobs to return at most.
            max_crashes: A job fails after this many crashes. Jobs that are one crash away from this limit are not
                returned.
        """
        times_ms = [int(MOVE_AFTER_S * 1000), int(MAX_MOVE_AFTER_S * 1000)]
        reply = await self._movable(
            keys=[self._keys.jobs(queue, partition, priority) for priority in Priority],
            args=[GROUP, worker, count, MAX_WAITING_EXAMINED, *times_ms, max_crashes],
        )
        return [
            (Claim(job_id.decode(), stream.decode(), entry.decode()), int(attempt))
            for stream, entry, job_id, attempt in reply
        ]

    async def claim_job(
        self,
        claim: Claim,
        worker: str,
        lease_ms: int,
        *,
        from_attempt: int | None = None,
        at_risk: bool = True,
        model: str = "",
        restart_other_model: bool = False,
    ) -> Attempt | ClaimCode:
        """Claim a job whose entry a worker has read: begin a new attempt, without a slot so far.

        Args:
            claim: The entry.
            worker: Id of the worker.
            lease_ms: How long the worker keeps the job without a renewal, in milliseconds.
            from_attempt: Number of the attempt that waits for a slot in another worker. The job is claimed only if it
                still waits there. None: the worker has taken the entry.
            at_risk: Whether the worker prepares the job at once, so that a crash of the worker counts against the job.
            model: Fingerprint of the worker's model. Empty: not known.
            restart_other_model: Whether a job that another model has begun starts again. Otherwise it is left to the
                workers of that model.

        Returns:
            The attempt. A code if the job was not claimed.
        """
        (outcome,) = await self.claim_jobs(
            [(claim, from_attempt)],
            worker,
            lease_ms,
            at_risk=at_risk,
            model=model,
            restart_other_model=restart_other_model,
        )
        if isinstance(outcome, RedisError):
            raise outcome
        return outcome

    async def claim_jobs(
        self,
        claims: Sequence[tuple[Claim, int | None]],
        worker: str,
        lease_ms: int,
        *,
        at_risk: bool = True,
        model: str = "",
        restart_other_model: bool = False,
    ) -> list[Attempt | ClaimCode | ResponseError]:
        """Claim several jobs of one partition, see `claim_job`.

        Args:
            claims: The entries, each with its `from_attempt`.
            worker: Id of the worker.
            lease_ms: See `claim_job`.
            at_risk: See `claim_job`.
            model: See `claim_job`.
            restart_other_model: See `claim_job`.

        Returns:
            For each of the first entries, in the same order, the attempt, or a code if the job was not claimed, or the
            error with which Redis refused to claim it. There are fewer outcomes than entries if there are many entries,
            or if their requests are large. The other jobs are unchanged: call again for them.
        """
        some = claims[:MAX_JOBS_IN_CALL]
        keys: list[str] = []
        values: list[int | str] = []
        for claim, from_attempt in some:
            of_job = self._keys.of_job(claim.job_id)
            keys += [of_job.job, of_job.events, claim.stream]
            values += [claim.entry_id, of_job.channel, "" if from_attempt is None else from_attempt]
        settings: list[Any] = [GROUP, worker, lease_ms, int(at_risk), model, int(restart_other_model)]
        return [
            _claim_outcome(reply)
            for reply in await self._claim(keys=keys, args=[*settings, codec.encode_values(values)])
        ]

    async def flush(
        self, worker: str, increments: Sequence[Increment], lease_ms: int, *, renew: bool
    ) -> list[FlushReply]:
        """Store and publish the increments of jobs of one partition, and record which jobs have a slot.

        Args:
            worker: Id of the worker that has claimed the jobs.
            increments: One increment for each job.
            lease_ms: How long the worker keeps a job without a renewal, in milliseconds.
            renew: Whether to renew the leases of all jobs.

        Returns:
            One reply for each increment, in the same order.
        """
        keys: list[str] = []
        values: list[int | str | bytes | Sequence[bytes]] = []
        for item in increments:
            of_job = self._keys.of_job(item.job_id)
            keys += [of_job.job, of_job.events, item.stream]
            values += [item.attempt, item.entry_id, of_job.channel, item.offset, item.count, item.payload]
            values += [item.publish, item.has_started, item.has_slot, item.slot_ms, item.token_times, item.progress]
        args: list[str | int | bytes] = [GROUP, worker, lease_ms, int(renew), codec.encode_values(values)]
        reply = await self._flush(keys=keys, args=args)
        return [
            FlushReply(code.decode(), int(stored), int(listeners), refusal.decode())
            for code, stored, listeners, refusal in zip(*(reply[place::4] for place in range(4)), strict=True)
        ]

    async def finish(self, worker: str, last: Increment, terminal_write: TerminalWrite) -> bool | int:
        """End a job. This works also when Redis is full.

        Args:
            worker: Id of the worker that runs the job.
            last: The tokens since the last flush, which are published.
            terminal_write: The terminal event, and the output.

        Returns:
            True: the job has ended now. False: a newer attempt exists, or the job had already ended. A number: the job
                has not ended, because Redis has stored only this number of its tokens, and `last` begins after them.
                Call again with all tokens after this number.
        """
        (outcome,) = await self.finish_jobs(worker, [(last, terminal_write)])
        if isinstance(outcome, RedisError):
            raise outcome
        return outcome

    async def finish_jobs(
        self, worker: str, ends: Sequence[tuple[Increment, TerminalWrite]]
    ) -> list[bool | int | ResponseError]:
        """End several jobs of one partition, at most `MAX_JOBS_IN_CALL`. See `finish`.

        Returns:
            For each job, in the same order, what `finish` returns, or the error with which Redis refused to end it.
        """
        job_id = JobId.parse(ends[0][0].job_id)
        keys = [self._keys.dead(job_id.queue, job_id.partition)]
        values: list[Any] = []
        for last, terminal_write in ends:
            of_job = self._keys.of_job(last.job_id)
            keys += [of_job.job, of_job.events, last.stream]
            values += [last.attempt, last.entry_id, of_job.channel, last.job_id, last.payload, last.offset, last.count]
            values += [codec.encode_event(terminal_write.event), terminal_write.status, last.has_started]
            values += [terminal_write.dead_reason, [part for pair in terminal_write.fields.items() for part in pair]]
            values.append(last.progress)
        args: list[Any] = [worker, GROUP, DEAD_TTL_S * 1000, MAX_DEAD, codec.encode_values(values)]
        return [_finish_outcome(reply) for reply in await self._finish(keys=keys, args=args)]

    async def add_stats(self, queue: str, jobs: Sequence[RecentJob]) -> None:
        """Add ended jobs to the stats of a queue. A repeated call adds them again, which only the stats show."""
        entries = [codec.encode_model(job) for job in jobs]
        await self._add_stats(keys=[self._keys.stats(queue)], args=[MAX_STATS, codec.encode_values(entries)])

    async def read_end(self, job_id: str, attempt: int, worker: str) -> StoredEnd | None:
        """Return how a claimed job has ended. For example, a client may have ended it while its worker had it.

        Args:
            job_id: Id of the job.
            attempt: Number of the worker's attempt.
            worker: Id of the worker.

        Returns:
            None when the job has not ended in this attempt, or is no longer stored.
        """
        fields: Any = ["status", "attempt", "worker", "finish_reason", "error"]
        try:
            stored: Any = await self._redis.hmget(self._keys.of_job(job_id).job, fields)
        except ResponseError as exc:
            if not is_job_key_error(exc):
                raise
            return None  # another client has overwritten the job
        status, number, holder, reason, error = stored
        if number != str(attempt).encode() or holder != worker.encode():
            return None
        if status == b"finished" and reason:
            return StoredEnd(FinishReason(reason.decode()), None)
        with suppress(ProtocolError):  # another client has overwritten the error
            event = codec.decode_event(error) if status == b"failed" and error else None
            return StoredEnd(None, event.code) if isinstance(event, Failed) else None
        return None

    async def cancel(self, job_id: str, *, only_waiting: bool = False) -> CancelCode:
        """Cancel a waiting or preempted job, and a running job unless `only_waiting` is true."""
        keys = self._keys.of_job(job_id)
        reply = await self._cancel(
            keys=[keys.job, keys.events, keys.interactive, keys.bulk],
            args=[GROUP, keys.channel, int(only_waiting)],
        )
        code: CancelCode = reply.decode()
        return code

    async def set_priority(self, job_id: str, priority: Priority) -> PriorityCode:
        """Change the priority of a job that has no slot."""
        keys = self._keys.of_job(job_id)
        streams = {Priority.INTERACTIVE: keys.interactive, Priority.BULK: keys.bulk}
        reply = await self._set_priority(
            keys=[keys.job, streams.pop(priority), *streams.values()], args=[job_id, priority.value, GROUP]
        )
        code: PriorityCode = reply.decode()
        return code

    async def position(self, job_id: str) -> int | None:
        """Return an upper bound on the number of jobs that get a slot before a job. None: the job does not wait."""
        keys = self._keys.of_job(job_id)
        reply: Any = await self._position(keys=[keys.job, keys.interactive, keys.bulk], args=[GROUP])
        return int(reply) if reply >= 0 else None

    async def due_jobs(self, queue: str, partition: int, count: int) -> DueJobs:
        """Give jobs that are due their entries, and find jobs whose deadline has passed: at most `count` of each."""
        keys = [self._keys.deadlines(queue, partition), self._keys.later(queue, partition)]
        now_ms, n_given, *expired = await self._due(keys=keys, args=[count])
        return DueJobs(int(now_ms), int(n_given), [job_id.decode() for job_id in expired])

    async def expire(self, job_id: str) -> ExpireCode:
        """End a job that has reached a deadline, or give a job its entry if it is due."""
        keys = self._keys.of_job(job_id)
        reply = await self._expire(
            keys=[keys.job, keys.events, keys.interactive, keys.bulk],
            args=[GROUP, keys.channel],
        )
        code: ExpireCode = reply.decode()
        return code

    async def retry(
        self, worker: str, last: Increment, error: Failed, *, first_delay_s: float, max_delay_s: float, share: float
    ) -> int | None:
        """Schedule a retry of a job whose attempt failed. All tokens of the job are stored already.

        Args:
            worker: Id of the worker that ran the attempt.
            last: The attempt.
            error: The failure.
            first_delay_s: Delay of the first retry of the job, in seconds. Each further retry doubles it.
            max_delay_s: Upper bound on the delay, in seconds.
            share: Share of the delay that is used, from 0.5 to 1.

        Returns:
            The delay in milliseconds. None: the job will not be retried, because it was cancelled, it has ended, or a
            newer attempt exists.
        """
        keys = self._keys.of_job(last.job_id)
        reply = await self._retry(
            keys=[keys.job, keys.events, last.stream],
            args=[
                last.attempt,
                worker,
                GROUP,
                last.entry_id,
                keys.channel,
                codec.encode_event(error),
                int(first_delay_s * 1000),
                int(max_delay_s * 1000),
                share,
            ],
        )
        return int(reply) if reply >= 0 else None

    async def requeue(self, claim: Claim, attempt: int | None, worker: str, *, crashed: bool = False) -> bool:
        """Requeue a job, so that another worker can take it at once.

        Args:
            claim: The entry of the job.
            attempt: Number of the worker's attempt. None: the worker has read the entry and not claimed the job.
            worker: Id of the worker.
            crashed: Whether the worker crashed, which counts as a death.

        Returns:
            Whether the job was requeued. False: a newer attempt exists, or the job has ended.
        """
        reply = await self._requeue(
            keys=[self._keys.of_job(claim.job_id).job, claim.stream],
            args=[
                "" if attempt is None else attempt,
                GROUP,
                claim.entry_id,
                worker,
                int(crashed),
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
