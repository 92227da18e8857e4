"""Decides whether a job is finished, and why."""

from __future__ import annotations

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.job_outcome import FinishReason
from llamaq.worker.core.job import Job

NOT_NUMBERS = (
    "the logits are not numbers, or infinite: no token can be drawn. The model's file may be damaged, its values too "
    "large for this device (try another quantization), or the sampling options too extreme"
)
"""Why a job fails whose next token cannot be drawn."""
ALL_NAN = (
    "the model computed only logits that are not numbers (NaN). Its file may be damaged, or its values too large for "
    "this device (try the other value of --flash-attn, another quantization, or smaller scales of LoRA adapters)"
)
"""Why a job fails if the values of the model have become NaN before the logits."""

JobFinish = FinishReason | JobRejected
"""How a job finishes: a finish reason, or the error when the job fails."""


def are_all_nan(error: JobRejected | None) -> bool:
    """Return whether a job fails because all logits that the model computed are NaN."""
    return error is not None and error.message == ALL_NAN


def is_end(job: Job, token: int, end_tokens: frozenset[int]) -> bool:
    """Return whether a token ends a job.

    Args:
        job: The job.
        token: A token that was sampled for it.
        end_tokens: The model's end-of-generation tokens.
    """
    return token in end_tokens or token in job.stop_tokens


def finish_reason(job: Job, n_tokens: int, max_length: int) -> FinishReason | None:
    """Return why a job is finished, or None when it continues.

    Args:
        job: The job.
        n_tokens: The tokens of its history, prompt and generated.
        max_length: `Job.max_length`, which the caller knows.
    """
    if job.detokenizer.has_ended:
        return FinishReason.STOP
    return FinishReason.LENGTH if n_tokens >= max_length else None


def finish_on_submit(job: Job, end_tokens: frozenset[int], n_slots: int) -> JobFinish | None:
    """Return how a job that needs no slot finishes, or None when the job needs a slot.

    A job fails on submit when its prompt is empty or too long, or when it requests a slot that the worker does not
    have. A resumed job can already be complete: its previous worker published the last token, and crashed before it
    wrote the outcome.
    """
    if job.request.slot is not None and job.request.slot >= n_slots:
        return JobRejected(
            ErrorCode.INVALID_REQUEST, f"slot: {job.request.slot}, but this worker has slots 0 to {n_slots - 1}"
        )
    if job.generated_before:
        has_end_token = is_end(job, job.generated_before[-1], end_tokens)
        return FinishReason.STOP if has_end_token else finish_reason(job, job.n_history, job.max_length)
    if not job.prompt:
        return JobRejected(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
    if len(job.prompt) >= job.context_limit:
        return JobRejected(
            ErrorCode.PROMPT_TOO_LONG,
            f"the prompt has {len(job.prompt)} tokens; prompt and answer together can have {job.context_limit} "
            "on this worker (limited by --n-ctx and by the model's training context)",
        )
    return None
