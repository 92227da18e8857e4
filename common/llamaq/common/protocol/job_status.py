"""Snapshots of a job and of a dead letter.

Times are milliseconds since the epoch by the clock of Redis.
"""

from __future__ import annotations

from pydantic import Field

from llamaq.common.protocol.job_events import Failed
from llamaq.common.protocol.job_outcome import FinishReason, JobState
from llamaq.common.protocol.job_request import JobRequest, Priority
from llamaq.common.protocol.wire_model import WireModel


class JobStatus(WireModel):
    """A snapshot of a job."""

    job_id: str = Field(description="Id of the job.")
    state: JobState = Field(description="`queued`, `running`, `finished` or `failed`.")
    attempt: int = Field(
        0,
        description="Number of claims so far: each claim by a worker is an attempt, even if the job did not start. "
        "0: no worker has claimed the job.",
    )
    worker: str | None = Field(None, description="Id of the worker that claimed the job last. None: no worker has.")
    crashes: int = Field(
        0, description="Number of workers in a row that died with this job before they stored a token of it."
    )
    position: int | None = Field(
        None,
        description="Number of jobs that get a slot before this waiting job. While tenants wait, it is an estimate. "
        "Otherwise it is an upper bound, which is exact if no job was cancelled. None: the job is not due, has a slot "
        "or has ended.",
    )
    prompt_tokens: int | None = Field(
        None, description="Number of tokens in the prompt. None: not known yet, or the job failed."
    )
    prefilled_tokens: int | None = Field(
        None,
        description="Number of prompt tokens that the worker has computed or reused, at its last heartbeat. None: not "
        "known yet, or the job failed.",
    )
    generated_tokens: int = Field(0, description="Number of tokens stored in Redis so far.")
    max_generated_tokens: int | None = Field(
        None, description="Largest number of tokens that the running job may generate. None: the job does not run."
    )
    submitted_ms: int | None = Field(None, description="Time of the submit.")
    run_at_ms: int | None = Field(None, description="Time at which the job becomes due. None: it is due already.")
    started_ms: int | None = Field(None, description="Time when the job had its first slot. None: not yet.")
    finished_ms: int | None = Field(None, description="Time when the job ended. None: not yet.")
    cancel_requested: bool = Field(False, description="Whether a client has called `cancel()`.")
    finish_reason: FinishReason | None = Field(None, description="Why the job finished. None: it has not finished.")
    error: Failed | None = Field(None, description="The error of a failed job. None: it has not failed.")
    retries_left: int | None = Field(
        None,
        description="Number of retries that the job has left. None: it was submitted without retries, or has finished.",
    )
    last_error: Failed | None = Field(None, description="The last failure that was retried. None: there was none.")


class JobSummary(WireModel):
    """A waiting or running job in the list of a queue's jobs."""

    job_id: str = Field(description="Id of the job.")
    state: JobState = Field(description="`queued` or `running`.")
    priority: Priority = Field(description="`interactive` or `bulk`.")
    age_s: float = Field(description="Seconds since the submit, when the list was read.")
    submitted_ms: int = Field(description="Time of the submit.")
    run_at_ms: int | None = Field(None, description="Time at which the job becomes due. None: it is due already.")
    attempt: int = Field(description="Number of claims by workers so far. 0: no worker has claimed the job.")
    worker: str | None = Field(description="Id of the worker of the newest attempt. None: no attempt.")
    generated_tokens: int = Field(description="Number of tokens stored in Redis so far.")
    cancel_requested: bool = Field(description="Whether a client has called `cancel()`.")
    tenant: str | None = Field(None, description="The job's tenant. None: it has none.")


class DeadLetter(WireModel):
    """A dead letter: a job that crashed its workers, failed after its last retry or is damaged, or an entry without a
    job.
    """

    id: str = Field(
        description="Argument of `show`, `retry` and `purge`: the id of the job, or QUEUE.PARTITION.ENTRY of an entry "
        "that is not a job."
    )
    job_id: str | None = Field(description="Id of the job. None: the entry was not a job.")
    reason: str = Field(description="Why the job or the entry is dead, in words.")
    workers: tuple[str, ...] = Field((), description="Ids of the workers that died with the job, oldest first.")
    dead_ms: int = Field(description="Time when the dead letter was written.")
    partition: int = Field(description="Partition of the queue.")
    entry: str = Field(description="Id of the entry in the partition's stream of dead letters.")


class DeadLetterDetails(DeadLetter):
    """A dead letter with the stored request and output of its job."""

    request: JobRequest | None = Field(
        None, description="The request of the job. None: the entry was not a job, or the job has expired."
    )
    text: str = Field("", description="The text that the job had generated.")
    tokens: tuple[int, ...] = Field((), description="The token ids that the job had generated.")
    held: str = Field("", description="Content of an entry that was not a job, cut to 4 KiB.")
