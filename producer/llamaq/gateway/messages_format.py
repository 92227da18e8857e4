"""The form of Anthropic's messages API: requests, answers, and the events of a streamed answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_outcome import FinishReason, JobStats, Result
from llamaq.producer.openai_format.chat_messages import read_chat
from llamaq.producer.openai_format.request_body import read_options

OPTIONS = ("max_tokens", "temperature", "top_k", "top_p")
"""Fields of a request that are job options of the same name."""
DROPPED_BLOCKS = ("thinking", "redacted_thinking")
"""Blocks of earlier answers that a chat template does not show again."""
STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.DEADLINE: "max_tokens",
    FinishReason.CANCELLED: "end_turn",
}


def read_messages_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `submit` that the body of a request means.

    Raises:
        InvalidRequest: A field has a form that is not supported. The message names it.
    """
    if body.get("tools"):
        raise InvalidRequest("tools: llamaq does not support it; leave it out")
    options = {name: body.get(name) for name in OPTIONS} | {"stop": body.get("stop_sequences")}
    return {**read_prompt(body), **read_options(options)}


def read_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages of a body as arguments of a job. The system prompt becomes the first one.

    If the last message is the assistant's, the answer continues it.

    Raises:
        InvalidRequest: There are no messages, or one has a form that is not supported.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: a list of messages is required")
    system = _text_of("system", body["system"]) if body.get("system") else ""
    chat = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"messages.{number}.role: user or assistant is required")
        chat.append({"role": role, "content": _text_of(f"messages.{number}.content", message.get("content"))})
    return read_chat({"messages": chat})


def _text_of(place: str, content: Any) -> str:
    """Return the text of a content: a text, or a list of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{place}: a text or a list of blocks is required")
    texts = []
    for number, block in enumerate(content):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": str(kind)} if kind in DROPPED_BLOCKS:
                pass
            case {"type": str(kind)}:
                raise InvalidRequest(
                    f"{place}.{number}.type: llamaq supports blocks of the type text, not {kind[:50]!r}"
                )
            case _:
                raise InvalidRequest(f"{place}.{number}: a block with a type is required")
    return "\n".join(texts)


def message_id(job_id: str) -> str:
    """Return the id of an answer, by the id of its job."""
    return f"msg_{job_id}"


def message_object(result: Result, model: str) -> dict[str, Any]:
    """Return the answer to a request."""
    return {
        **_frame(result.job_id, model),
        "content": [{"type": "text", "text": result.text}],
        **_ending(result),
        "usage": usage_object(result.stats),
    }


def usage_object(stats: JobStats) -> dict[str, int]:
    """Return the usage of a job. The input tokens are those that were computed, without the cached ones."""
    return {
        "input_tokens": max(stats.prompt_tokens - stats.prefix_cache_tokens, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.prefix_cache_tokens,
        "output_tokens": stats.generated_tokens,
    }


def first_events(job_id: str, model: str) -> list[dict[str, Any]]:
    """Return the events that begin a streamed answer. The number of input tokens follows with the last event."""
    message = {
        **_frame(job_id, model),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]


def text_event(text: str) -> dict[str, Any]:
    """Return the event with the next text of a streamed answer."""
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


def last_events(result: Result) -> list[dict[str, Any]]:
    """Return the events that end a streamed answer."""
    return [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": _ending(result), "usage": usage_object(result.stats)},
        {"type": "message_stop"},
    ]


def _frame(job_id: str, model: str) -> dict[str, Any]:
    return {"id": message_id(job_id), "type": "message", "role": "assistant", "model": model}


def _ending(result: Result) -> dict[str, Any]:
    stop = result.stats.stop_string
    return {
        "stop_reason": STOP_REASONS[result.finish_reason] if stop is None else "stop_sequence",
        "stop_sequence": stop,
    }
