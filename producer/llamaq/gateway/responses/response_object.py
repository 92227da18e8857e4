"""Builds the object `response` of the Responses API from a record and the state of its job."""

from __future__ import annotations

from typing import Any

from llamaq.common.errors import JobFailed
from llamaq.common.protocol.job_outcome import FinishReason, JobState, JobStats, Result
from llamaq.gateway.responses.record import ID_PREFIX, ResponseRecord

STATUSES = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.DEADLINE: "incomplete",
    FinishReason.CANCELLED: "cancelled",
}


def open_response(job_id: str, record: ResponseRecord, state: JobState = JobState.RUNNING) -> dict[str, Any]:
    """Return a response whose job has not ended."""
    return _response(job_id, record, "queued" if state is JobState.QUEUED else "in_progress")


def ended_response(job_id: str, record: ResponseRecord, result: Result) -> dict[str, Any]:
    """Return a response whose job has ended."""
    status = STATUSES[result.finish_reason]
    return _response(job_id, record, status) | {
        "output": [message_item(job_id, result.text, "completed" if status == "completed" else "incomplete")],
        "usage": usage_object(result.stats),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
    }


def failed_response(job_id: str, record: ResponseRecord, error: JobFailed) -> dict[str, Any]:
    """Return a response whose job has failed."""
    code = "invalid_prompt" if error.http_status < 500 else "server_error"
    return _response(job_id, record, "failed") | {"error": {"code": code, "message": f"{error.code}: {error.message}"}}


def message_item(job_id: str, text: str, status: str) -> dict[str, Any]:
    """Return the item of the output that has the text."""
    content = [] if status == "in_progress" else [text_part(text)]
    return {"id": item_id(job_id), "type": "message", "role": "assistant", "status": status, "content": content}


def item_id(job_id: str) -> str:
    """Return the id of the item that has the text."""
    return f"msg_{job_id}"


def text_part(text: str) -> dict[str, Any]:
    """Return the part of an item that has the text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_object(stats: JobStats) -> dict[str, Any]:
    """Return the usage of a job."""
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.prefix_cache_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
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
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **record.shown,
    }
