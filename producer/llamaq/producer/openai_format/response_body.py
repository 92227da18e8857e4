"""Builds the objects of the OpenAI API: completions, their usage, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamaq.common.errors import ErrorCode, InvalidRequest, JobFailed, LlamaqError
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.producer.openai_format.endpoints import Endpoint

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's `code` of a prompt that is too long. Clients look for it, for example to shorten the conversation."""
CONTEXT_EXCEEDED_TYPE = "exceed_context_size_error"
"""llama-server's `type` of this error."""
FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "stop",
    FinishReason.DEADLINE: "length",
}
"""Maps each finish reason of llamaq to a finish reason of the OpenAI API, whose clients know no other values."""
CALL_FIELDS = frozenset({"tool_calls", "function_call"})
"""The fields of a message with calls, of which it has one. Its name is also the finish reason of such an answer."""


def completion_object(
    endpoint: Endpoint,
    *results: Result,
    model: str,
    created_s: int,
    n: int = 1,
    echoed: Sequence[str] = (),
    logprobs: Sequence[dict[str, Any] | None] = (),
    messages: Sequence[dict[str, Any]] = (),
    n_reasoning: int | None = None,
) -> dict[str, Any]:
    """Return the object `chat.completion` or `text_completion` of finished jobs.

    Args:
        endpoint: The endpoint of the request.
        *results: The results of the jobs, one for each choice.
        model: The name of the model that the answer shows.
        created_s: Time of the answer, in seconds since the epoch.
        n: Number of choices for each prompt.
        echoed: For each choice, the text before the generated text. Empty: there is none.
        logprobs: For each choice, its object `logprobs`, or None: its job has none. Empty: no choice has any.
        messages: For each choice, its message. Empty: messages have only content.
        n_reasoning: Number of tokens of reasoning. None: the usage does not have it.
    """
    is_chat = endpoint is Endpoint.CHAT
    choices = [
        _choice(endpoint, index, result, echoed[index] if echoed else "", logprobs[index] if logprobs else None)
        for index, result in enumerate(results)
    ]
    for choice, message in zip(choices, messages, strict=False):
        choice["message"] = message
        found = CALL_FIELDS & message.keys()
        if found and choice["finish_reason"] == "stop":
            (choice["finish_reason"],) = found
    return {
        "id": completion_id(endpoint, results[0].job_id),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": choices,
        "usage": usage_object(*(result.stats for result in results), n=n, n_reasoning=n_reasoning),
    }


def completion_id(endpoint: Endpoint, job_id: str) -> str:
    """Return the id of the answer to a request, by the id of its first job."""
    return ("chatcmpl-" if endpoint is Endpoint.CHAT else "cmpl-") + job_id


def _choice(
    endpoint: Endpoint, index: int, result: Result, echoed: str, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if endpoint is Endpoint.CHAT:
        choice["message"] = {"role": "assistant", "content": result.text}
    else:
        choice["text"] = echoed + result.text
    return choice | {"logprobs": logprobs, "finish_reason": FINISH_REASONS[result.finish_reason]} | stop_reason(result)


def stop_reason(result: Result) -> dict[str, Any]:
    """Return vLLM's field `stop_reason`: the stop string or the token of `stop_token_ids` that has ended a job. Without
    one: no field.
    """
    stats = result.stats
    found = stats.stop_token if stats.stop_string is None else stats.stop_string
    return {} if found is None else {"stop_reason": found}


def usage_object(*stats: JobStats, n: int = 1, n_reasoning: int | None = None) -> dict[str, Any]:
    """Return the object `usage` of finished jobs. A prompt counts once, although `n` choices share it."""
    details = {} if n_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": n_reasoning}}
    prompts = stats[::n]
    prompt = sum(each.prompt_tokens for each in prompts)
    generated = sum(each.generated_tokens for each in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(each.prefix_cache_tokens for each in prompts)},
        **details,
    }


def job_error_code(error: JobFailed) -> str:
    """Return the `code` of a job's error in the OpenAI API."""
    return CONTEXT_LENGTH_EXCEEDED if error.code == ErrorCode.PROMPT_TOO_LONG else error.code


def error_object(error: LlamaqError) -> dict[str, Any]:
    """Return the value of `error` in the answer to a request that failed."""
    code, message = getattr(error, "code", None), str(error)
    if isinstance(error, JobFailed):
        code, message = job_error_code(error), error.message
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    return {
        "message": message,
        "type": CONTEXT_EXCEEDED_TYPE if code == CONTEXT_LENGTH_EXCEEDED else kind,
        "param": message.partition(":")[0] if isinstance(error, InvalidRequest) and ":" in message else None,
        "code": code,
    }
