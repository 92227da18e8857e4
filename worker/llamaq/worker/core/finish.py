"""When a job has come to its end."""

from __future__ import annotations

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.core.job import Job

Finish = FinishReason | JobRejected
"""How a job ends: it finishes for a reason, or it fails."""


def reason_to_end(job: Job, n_generated: int) -> FinishReason | None:
    """Why a job that has generated so many tokens goes no further, or None."""
    if job.detokenizer.stopped:
        return FinishReason.STOP
    n_tokens = len(job.prompt) + n_generated
    if n_generated >= job.request.max_tokens or n_tokens >= job.context_limit:
        return FinishReason.LENGTH
    return None


def ending_before_start(job: Job, end_tokens: frozenset[int], n_slots: int) -> Finish | None:
    """How a job ends that needs no slot, or None.

    A prompt that cannot fit fails, and so does a job that asks for a slot that is not there. A resumed job may have
    come to its end before the worker that ran it could write so.
    """
    if job.request.slot is not None and job.request.slot >= n_slots:
        return JobRejected(
            ErrorCode.INVALID_REQUEST, f"slot: {job.request.slot}, but this worker has slots 0 to {n_slots - 1}"
        )
    if job.resumed:
        ended = job.resumed[-1] in end_tokens
        return FinishReason.STOP if ended else reason_to_end(job, len(job.resumed))
    if not job.prompt:
        return JobRejected(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
    if len(job.prompt) >= job.context_limit:
        return JobRejected(
            ErrorCode.PROMPT_TOO_LONG,
            f"the prompt has {len(job.prompt)} tokens; prompt and answer together can have {job.context_limit} "
            "on this worker (--n-ctx, and what the model was trained for)",
        )
    return None
