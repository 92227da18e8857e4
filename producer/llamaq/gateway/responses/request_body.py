"""Reads the body of a request of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.gateway.responses.input_items import Messages, read_input, read_instructions
from llamaq.gateway.responses.tools import read_response_tools, usable_tools
from llamaq.producer.openai_format.chat_messages import check_encodable, with_effort
from llamaq.producer.openai_format.request_body import (
    check_length,
    read_fields,
    read_flag,
    read_model,
    read_options,
    refuse_unsupported,
    with_integers,
)
from llamaq.producer.openai_format.tools import ToolChoice

SHOWN: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that the response repeats, and their values if the request does not have them."""
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` for which an answer has the probabilities of its tokens."""


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
    """The id of the response that the conversation continues. None: the conversation begins with this request."""
    tool_choice: ToolChoice
    """The tools that the answer may call."""
    is_truncated: bool
    """Whether the oldest messages are left out of a conversation that is longer than the context."""
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
    body = with_integers(body)
    if body.get("conversation") is not None:
        raise InvalidRequest("conversation: llamaq does not support it; use previous_response_id")
    if body.get("prompt") is not None:
        raise InvalidRequest("prompt: llamaq stores no prompts; use input")
    previous = body.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise InvalidRequest("previous_response_id: a text is required")
    if body.get("truncation") not in (None, "auto", "disabled"):
        raise InvalidRequest("truncation: auto or disabled is required")
    is_stored, is_background = body.get("store") is not False, read_flag(body, "background")
    if is_background and not is_stored:
        raise InvalidRequest("store: a background response is stored; leave store out")
    choice = read_response_tools(body)
    check_encodable("tools", choice.tools)
    shown = {name: default if body.get(name) is None else body[name] for name, default in SHOWN.items()}
    return ResponseBody(
        model=read_model(body),
        options=_read_job_options(body) | ({"tools": list(choice.tools)} if choice.tools else {}),
        instructions=read_instructions(body),
        messages=read_input(body.get("input")),
        previous_id=previous,
        tool_choice=choice,
        is_truncated=body.get("truncation") == "auto",
        is_streamed=read_flag(body, "stream"),
        is_stored=is_stored,
        is_background=is_background,
        shown=shown | {"metadata": body.get("metadata") or {}, "store": is_stored, "tools": usable_tools(body)},
    )


def _read_job_options(body: Mapping[str, Any]) -> dict[str, Any]:
    check_length(body, "max_output_tokens")
    text, include = read_fields(body, "text"), body.get("include") or []
    renamed = {
        **body,
        "max_tokens": body.get("max_output_tokens", body.get("max_tokens")),
        "response_format": text.get("format"),
    }
    n_top = body.get("top_logprobs")
    n_top = 0 if n_top is None else n_top
    if not isinstance(include, list) or type(n_top) is not int:
        raise InvalidRequest("include: a list is required, and a number as top_logprobs")
    reasoning = read_fields(body, "reasoning")
    if reasoning.get("summary") not in (None, "auto", "concise", "detailed"):
        raise InvalidRequest("reasoning.summary: auto, concise or detailed is required")
    kwargs = with_effort(body.get("chat_template_kwargs"), reasoning.get("effort"))
    return {
        **read_options(renamed),
        **({"logprobs": n_top} if n_top or LOGPROBS in include else {}),
        **({"chat_template_kwargs": kwargs} if kwargs else {}),
    }
