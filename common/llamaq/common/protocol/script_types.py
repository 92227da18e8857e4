"""The values that the Lua scripts get and return, as Python objects.

`job_scripts`, `claim_scripts` and `attempt_scripts` send and receive them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from redis.exceptions import ResponseError

from llamaq.common.protocol.embedding_task import JobKind
from llamaq.common.protocol.job_events import Event, Failed, Finished
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.keys import JobId, priority_of

MAX_JOBS_IN_CALL = 64
"""Upper bound on the jobs that one call of a script claims or ends. Meanwhile Redis executes nothing else."""

ClaimCode = Literal["gone", "done", "ended", "stale", "paused", "left"]
"""Why a job was not claimed; claim.lua explains the values."""
FlushCode = Literal["ok", "cancel", "lost"]
"""What a worker must do with a job after a flush; flush.lua explains the values."""
FinishCode = Literal["ok", "lost", "resend"]
"""The effect of a call of `finish`; `FinishReply` explains the values."""
CancelCode = Literal["gone", "done", "cancelled", "requested", "running"]
"""The effect of a call of `cancel`; cancel.lua explains the values."""
ExpireCode = Literal["none", "ended", "given"]
"""The effect of a call of `expire`; expire.lua explains the values."""
PriorityCode = Literal["gone", "done", "running", "changed"]
"""The effect of a call of `set_priority`; set_priority.lua explains the values."""


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
class SubmitQueueFull:
    """The reply to a submit into a full queue.

    Attributes:
        depth: Number of waiting jobs in the partition.
        max_queue: Number of waiting jobs that the workers allow.
    """

    depth: int
    max_queue: int


@dataclass(frozen=True, slots=True)
class OtherPartitions:
    """The reply to a submit if client and queue have different numbers of partitions.

    Attributes:
        partitions: Number of partitions of the queue.
    """

    partitions: int


@dataclass(frozen=True, slots=True)
class SubmitConflict:
    """The reply to a submit whose idempotency key belongs to a job with another request.

    Attributes:
        job_id: Id of the job that has the key.
    """

    job_id: str


@dataclass(frozen=True, slots=True)
class SubmitDraining:
    """The reply to a submit into a queue that is draining."""


@dataclass(frozen=True, slots=True)
class OtherKind:
    """The reply to a submit of a job that the workers of the queue do not run.

    Attributes:
        kind: What the jobs of the queue compute.
    """

    kind: JobKind


SubmitReply = Submitted | SubmitQueueFull | SubmitConflict | SubmitDraining | OtherPartitions | OtherKind


@dataclass(frozen=True, slots=True)
class Submission:
    """A job to submit.

    Attributes:
        job_id: Id of the new job.
        request: The request.
        payload: The same request, encoded.
        result_ttl_s: How long Redis stores the result after the end of the job, in seconds.
        event_ttl_s: How long Redis stores the events after the end of the job, in seconds. 0: they are deleted at the
            end. The result is complete without them.
        partitions: Number of partitions of the queue, which the script compares with that of the workers. 0: not known.
    """

    job_id: JobId
    request: JobRequest
    payload: bytes
    result_ttl_s: float
    event_ttl_s: float
    partitions: int


@dataclass(frozen=True, slots=True)
class JobEntry:
    """An entry of a job stream, and the job that it names. A worker has taken it, or takes it from another one.

    Attributes:
        job_id: Id of the job.
        stream: The job stream.
        entry_id: Id of the entry in that stream.
        from_attempt: Number of the attempt that waits for a slot in another worker, or in this one: the job is claimed
            only if it still waits there. None: the worker has taken the entry.
    """

    job_id: str
    stream: str
    entry_id: str
    from_attempt: int | None = None

    @property
    def partition(self) -> int:
        """The partition of the job. The job id was checked when the entry was read."""
        return int(self.job_id.split(".")[1])

    @property
    def priority(self) -> Priority:
        """The priority of the stream, which is that of the job."""
        return priority_of(self.stream)


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that has begun.

    Attributes:
        number: Number of the attempt. Every write contains it; Redis refuses writes of older attempts.
        request: The encoded request.
        generated: Number of tokens that earlier attempts stored.
        waited_ms: Milliseconds from submit to this claim, or from the time for which the job was submitted.
        queue_ms: Milliseconds from the same time to the first slot of the job. None: it had no slot so far.
        slot_ms: Milliseconds that earlier attempts had a slot.
        left_ms: Milliseconds from this claim to the deadline of the job. None: it has no deadline.
        retries_left: Number of times that the job may be retried after a failure. None: it has the option `retries=0`.
        token_times: The times of the tokens that earlier attempts stored, as `TokenTimes.encode` returns them.
    """

    number: int
    request: bytes
    generated: int
    waited_ms: float
    queue_ms: float | None
    slot_ms: float
    left_ms: float | None
    retries_left: int | None
    token_times: str = ""


ClaimOutcome = Attempt | ClaimCode | ResponseError
"""What Redis has answered to the claim of a job: the attempt, or why it was not claimed."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """A worker that claims jobs.

    Attributes:
        worker: Id of the worker.
        lease_ms: How long the worker keeps a job without a renewal, in milliseconds.
        model: Fingerprint of the worker's model. Empty: not known.
        restart_other_model: Whether a job that another model has begun starts again. Otherwise it is left to the
            workers of that model.
    """

    worker: str
    lease_ms: int
    model: str = ""
    restart_other_model: bool = False


@dataclass(frozen=True, slots=True)
class Reader:
    """A process of a worker that reads job streams.

    Attributes:
        claimant: The worker, which claims the jobs of the entries, and prepares them at once.
        token: Random text of this process. A call with the same token and the same `n_replies` gets the same reply, so
            no job is forgotten if the first reply was lost.
        n_replies: For each stream, how many replies with entries of the stream the process has received.
    """

    claimant: Claimant
    token: str
    n_replies: dict[str, int]


class Entry(NamedTuple):
    """An entry of a job stream.

    Attributes:
        entry_id: Id of the entry.
        fields: Its fields.
        outcome: What Redis has answered to the claim of its job. None: the job was not claimed with the read.
    """

    entry_id: bytes
    fields: dict[bytes, bytes]
    outcome: ClaimOutcome | None = None


StreamEntries = list[Entry]
"""The entries of one stream."""


@dataclass(frozen=True, slots=True)
class JobFlush:
    """What one flush writes of a job: the tokens since its last flush, and the present state of the job.

    Attributes:
        job_id: Id of the job.
        attempt: Number of the attempt.
        stream: Job stream that the job was read from.
        entry_id: Id of the job's entry in that stream.
        offset: Number of tokens of the job before the first token of this flush.
        count: Number of tokens in this flush.
        payload: The encoded event `tokens`; empty if there are no new tokens.
        publish: Whether subscribers receive the event.
        has_started: Whether the job has a slot, or had one in this attempt.
        has_slot: Whether the job has a slot now.
        slot_ms: Milliseconds that the job has had a slot, over all attempts.
        token_times: The times of all tokens of the job so far, as `TokenTimes.encode` returns them.
        progress: The encoded events `prompt_progress` since the last flush, which are published before the tokens.
        withheld: The encoded event `tokens` with the text that is withheld after the new tokens. It is emitted if the
            job ends before a worker continues it. Empty if there is none.
        is_watched: Whether to count the subscribers.
    """

    job_id: str
    attempt: int
    stream: str
    entry_id: str
    offset: int
    count: int
    payload: bytes
    publish: bool = True
    has_started: bool = True
    has_slot: bool = True
    slot_ms: int = 0
    token_times: str = ""
    progress: tuple[bytes, ...] = ()
    withheld: bytes = b""
    is_watched: bool = True


@dataclass(frozen=True, slots=True)
class FlushReply:
    """The reply to the flush of one job.

    Attributes:
        code: What the worker must do with the job.
        stored: Number of tokens of the job that Redis has now.
        listeners: Number of subscribers of the job; 0 if they are not counted.
        refusal: Error text of Redis if it refused to store the event; otherwise empty.
    """

    code: FlushCode
    stored: int
    listeners: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class FinishReply:
    """The reply to the end of one job.

    Attributes:
        code: `ok`: the job has ended now. `lost`: a newer attempt exists, or the job had already ended. `resend`: the
            job has not ended, because Redis has only the first `stored` of its tokens. Call again with all tokens
            after these.
        stored: Number of tokens that Redis has, for `resend`; otherwise 0.
    """

    code: FinishCode
    stored: int = 0


@dataclass(frozen=True, slots=True)
class StoredEnd:
    """How a job has ended. Exactly one of the fields is set.

    Attributes:
        finish_reason: Why the job ended without an error.
        error_code: The code of a failed job.
    """

    finish_reason: FinishReason | None
    error_code: str | None


@dataclass(frozen=True, slots=True)
class TerminalWrite:
    """The last write to a job.

    Attributes:
        event: The terminal event, `Finished` or `Failed`.
        fields: Fields of the job's hash that store the result or the error.
        dead_reason: Why the failed job becomes a dead letter. Empty: it does not.
    """

    event: Event
    fields: Mapping[str, bytes | str]
    dead_reason: str = ""

    @property
    def status(self) -> str:
        """The field `status` of the job's hash: `finished` or `failed`."""
        return "finished" if isinstance(self.event, Finished) else "failed"

    @property
    def end(self) -> StoredEnd:
        """How the job ends."""
        if isinstance(self.event, Finished):
            return StoredEnd(self.event.finish_reason, None)
        return StoredEnd(None, self.event.code if isinstance(self.event, Failed) else None)


@dataclass(frozen=True, slots=True)
class DueJobs:
    """The jobs of a partition that are due.

    Attributes:
        now_ms: The time of the server in milliseconds since the epoch.
        n_given: Number of due jobs that got their entry in the job stream from this call.
        n_open: Number of jobs that have not ended.
        expired: Ids of jobs whose deadline has passed, as they are stored. `end_expired` ends these jobs. Another
            client of Redis may have written something else than an id, so they may not be text.
    """

    now_ms: int
    n_given: int
    n_open: int
    expired: list[bytes]
