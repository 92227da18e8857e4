"""Builds the objects of the OpenAI API: completions, their usage, and errors."""

from __future__ import annotations

from typing import Any

from llamaq.common.errors import InvalidRequest, JobFailed, LlamaqError
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.producer.openai_format.endpoints import Endpoint

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "stop",
    FinishReason.DEADLINE: "length",
}
"""The finish reason of the OpenAI API for each of ours. A client of that API knows no other values."""


def completion_object(endpoint: Endpoint, result: Result, *, model: str, created_s: int) -> dict[str, Any]:
    """Return the object `chat.completion` or `text_completion` of a finished job.

    Args:
        endpoint: The endpoint of the request.
        result: The result of the job.
        model: The name of the model that the answer shows.
        created_s: Time of the answer, in seconds since the epoch.
    """
    choice: dict[str, Any] = {"index": 0}
    if endpoint is Endpoint.CHAT:
        choice["message"] = {"role": "assistant", "content": result.text}
    else:
        choice["text"] = result.text
    choice |= {"logprobs": None, "finish_reason": FINISH_REASONS[result.finish_reason]}
    is_chat = endpoint is Endpoint.CHAT
    return {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + result.job_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": [choice],
        "usage": usage_object(result.stats),
    }


def usage_object(stats: JobStats) -> dict[str, Any]:
    """Return the object `usage` of a finished job."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.prefix_cache_tokens},
    }


def error_object(error: LlamaqError) -> dict[str, Any]:
    """Return the value of `error` in the answer to a request that failed."""
    status = int(error.http_status)
    code, message = (error.code, error.message) if isinstance(error, JobFailed) else (None, str(error))
    return {
        "message": message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": message.partition(":")[0] if isinstance(error, InvalidRequest) and ":" in message else None,
        "code": code,
    }
