"""Reads the body of a request of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.producer.openai_format.chat_messages import read_messages
from llamaq.producer.openai_format.request_body import read_flag, read_options, refuse_unsupported

SHOWN = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "temperature",
    "text",
    "top_p",
    "truncation",
    "user",
)
"""Fields of a request that the response shows again."""
DROPPED_ITEMS = ("reasoning",)
"""Items of earlier answers that a chat template does not show again."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """What the body of `/v1/responses` asks for."""

    model: str | None
    options: dict[str, Any]
    """The job options."""
    instructions: Messages
    """The system message of this request alone. It is not part of the conversation that is continued later."""
    messages: Messages
    """The new messages of the conversation."""
    previous_id: str | None
    """The id of the response that the conversation continues. None: it begins here."""
    is_streamed: bool
    is_stored: bool
    is_background: bool
    """Whether the answer is the response as it is after the submit."""
    shown: dict[str, Any]
    """Fields that the response shows again."""


def read_response_body(body: Mapping[str, Any]) -> ResponseBody:
    """Return what the body of a request asks for.

    Raises:
        InvalidRequest: A field has a form that is not supported. The message names it.
    """
    refuse_unsupported(body)
    if body.get("tools") and body.get("tool_choice") != "none":
        raise InvalidRequest("tools: llamaq does not support it here; leave it out, or use /v1/chat/completions")
    if body.get("conversation") is not None:
        raise InvalidRequest("conversation: llamaq does not support it; use previous_response_id")
    if body.get("prompt") is not None:
        raise InvalidRequest("prompt: llamaq stores no prompts; use input")
    model, previous = body.get("model"), body.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise InvalidRequest("previous_response_id: a text is required")
    is_stored, is_background = body.get("store") is not False, read_flag(body, "background")
    if is_background and not is_stored:
        raise InvalidRequest("store: a background response is stored; leave store out")
    metadata = body.get("metadata") or {}
    return ResponseBody(
        model=model if isinstance(model, str) and model else None,
        options=_read_job_options(body),
        instructions=read_instructions(body),
        messages=read_input(body.get("input")),
        previous_id=previous,
        is_streamed=read_flag(body, "stream"),
        is_stored=is_stored,
        is_background=is_background,
        shown={name: body.get(name) for name in SHOWN} | {"metadata": metadata, "store": is_stored},
    )


def _read_job_options(body: Mapping[str, Any]) -> dict[str, Any]:
    text = body.get("text")
    if text is not None and not isinstance(text, Mapping):
        raise InvalidRequest("text: an object is required")
    renamed = {
        **body,
        "max_tokens": body.get("max_output_tokens", body.get("max_tokens")),
        "response_format": text.get("format") if text else None,
    }
    kwargs = body.get("chat_template_kwargs")
    return read_options(renamed) | ({} if kwargs is None else {"chat_template_kwargs": kwargs})


def read_instructions(body: Mapping[str, Any]) -> Messages:
    """Return the system message that `instructions` means, as a list of at most one.

    Raises:
        InvalidRequest: It is no text.
    """
    instructions = body.get("instructions")
    if instructions is None or instructions == "":
        return []
    if not isinstance(instructions, str):
        raise InvalidRequest("instructions: a text is required")
    return [{"role": "system", "content": instructions}]


def read_input(value: Any) -> Messages:
    """Return the messages that `input` means: a text, or a list of items.

    Raises:
        InvalidRequest: It has a form that is not supported.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input: a text or a list of items is required")
    items = [item for number, item in enumerate(value) if _is_message(number, item)]
    try:
        return read_messages({"messages": items})
    except InvalidRequest as exc:
        raise InvalidRequest(str(exc).replace("messages", "input", 1)) from exc


def _is_message(number: int, item: Any) -> bool:
    kind = item.get("type", "message") if isinstance(item, Mapping) else "message"
    if kind in DROPPED_ITEMS:
        return False
    if kind != "message":
        raise InvalidRequest(f"input.{number}.type: llamaq supports items of the type message, not {str(kind)[:50]!r}")
    return True


def input_items(job_id: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as the items of `/v1/responses/{id}/input_items`."""
    return [
        {
            "id": f"msg_{job_id}_{number}",
            "type": "message",
            "role": message["role"],
            "status": "completed",
            "content": [
                {
                    "type": "output_text" if message["role"] == "assistant" else "input_text",
                    "text": message["content"],
                    **({"annotations": []} if message["role"] == "assistant" else {}),
                }
            ],
        }
        for number, message in enumerate(messages)
    ]
