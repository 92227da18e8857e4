"""Builds the object `response` of the Responses API from a record and the state of its job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamaq.common.errors import JobFailed
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats, Result
from llamaq.gateway.responses.record import ID_PREFIX, ResponseRecord
from llamaq.producer.openai_format.response_body import CONTEXT_LENGTH_EXCEEDED, job_error_code

STATUSES = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.DEADLINE: "incomplete",
    FinishReason.CANCELLED: "cancelled",
}


def open_response(job_id: str, record: ResponseRecord, state: JobState = JobState.RUNNING) -> dict[str, Any]:
    """Return a response whose job has not ended."""
    return _response(job_id, record, "queued" if state is JobState.QUEUED else "in_progress")


def is_complete(result: Result) -> bool:
    """Return whether the model has ended its answer."""
    return STATUSES[result.finish_reason] == "completed"


def ended_response(
    job_id: str, record: ResponseRecord, result: Result, output: Sequence[dict[str, Any]], n_reasoning: int
) -> dict[str, Any]:
    """Return a response whose job has ended.

    Args:
        job_id: The job.
        record: What is stored about the response.
        result: The result of the job.
        output: The items of its output.
        n_reasoning: Number of the generated tokens that are reasoning.
    """
    status = STATUSES[result.finish_reason]
    return _response(job_id, record, status) | {
        "output": list(output),
        "usage": usage_object(result.stats, n_reasoning),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
    }


def failed_response(job_id: str, record: ResponseRecord, error: JobFailed) -> dict[str, Any]:
    """Return a response whose job has failed."""
    code, kind = job_error_code(error), "invalid_prompt" if error.http_status < 500 else "server_error"
    described = {
        "code": code if code == CONTEXT_LENGTH_EXCEEDED else kind,
        "message": f"{code}: {error.message}",
    }
    return _response(job_id, record, "failed") | {"error": described}


def usage_object(stats: JobStats, n_reasoning: int) -> dict[str, Any]:
    """Return the usage of a job."""
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.prefix_cache_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": n_reasoning},
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
    }


def _response(job_id: str, record: ResponseRecord, status: str) -> dict[str, Any]:
    return {
        "id": ID_PREFIX + job_id,
        "object": "response",
        "created_at": record.created_s,
        "status": status,
        "background": record.is_background,
        "model": record.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **record.shown,
    }
