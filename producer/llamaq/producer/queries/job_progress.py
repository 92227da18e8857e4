"""Reads how far a job is: its position among the waiting jobs, and its prompt and output tokens."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol import codec
from llamaq.common.protocol.job_outcome import JobState, JobStats
from llamaq.common.protocol.job_status import JobStatus
from llamaq.common.protocol.queue_and_worker_state import SlotSnapshot, Worker
from llamaq.producer.queue_connection import QueueConnection


async def with_progress(connection: QueueConnection, status: JobStatus) -> JobStatus:
    """Return the status with the progress of the job: the position of a waiting job, or the numbers of tokens of any
    other job.
    """
    if status.state is JobState.QUEUED:
        return status.model_copy(update={"position": await connection.scripts.position(status.job_id)})
    if status.state is JobState.RUNNING and status.worker is not None:
        slot = await _slot_of(connection, status.worker, status.job_id)
        return status if slot is None else status.model_copy(update=_of_slot(slot))
    stats = await _stats_of(connection, status.job_id)
    if stats is None:
        return status
    return status.model_copy(update={"prompt_tokens": stats.prompt_tokens, "prefilled_tokens": stats.prompt_tokens})


def _of_slot(slot: SlotSnapshot) -> dict[str, int]:
    return {
        "prompt_tokens": slot.prompt_tokens,
        "prefilled_tokens": slot.prefilled_tokens,
        "max_generated_tokens": slot.max_generated_tokens,
    }


async def _slot_of(connection: QueueConnection, worker: str, job_id: str) -> SlotSnapshot | None:
    """Return the slot of a running job, as its worker last reported it. None: the worker has not reported it.

    On a cluster, the report may be on a node that does not answer.
    """
    with suppress(RedisError, ProtocolError):
        data: Any = await connection.redis.hget(connection.keys.worker(worker), "worker")
        slots = codec.decode_model(Worker, data).slots if data else ()
        return next((slot for slot in slots if slot.job_id == job_id), None)
    return None


async def _stats_of(connection: QueueConnection, job_id: str) -> JobStats | None:
    """Return the measurements of a job that a worker has finished. None: it failed, or no worker ended it."""
    data: Any = await connection.redis.hget(connection.keys.of_job(job_id).job, "stats")
    with suppress(ProtocolError):
        stats = codec.decode_model(JobStats, data) if data else None
        return stats if stats is not None and stats.prompt_tokens else None
    return None
