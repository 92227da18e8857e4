"""Reads the body of a request of the OpenAI API: which prompt it has, and which job options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer.accepted_forms import SYNONYMS
from llamaq.producer.openai_format.endpoints import Endpoint

RESERVED = frozenset(
    {
        "cancel_on_disconnect", "has_random_seed", "idempotency_key", "messages", "priority", "prompt", "stream", "tokens",
    }
)  # fmt: skip
"""Fields of a job that a body does not set as options: the caller of `read_body` sets them, or they are the prompt."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "logprobs": (False, 0),
    "n": (1,),
    "suffix": ("",),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Fields that change the answer and that llamaq does not support, with the values that mean the same as no field."""


@dataclass(frozen=True, slots=True)
class GenerationBody:
    """What a body of `/v1/chat/completions` or `/v1/completions` asks for."""

    endpoint: Endpoint
    model: str | None
    """The name of the model in the body. None: the body names none."""
    values: dict[str, Any]
    """The arguments of `submit`: one of `prompt`, `tokens` and `messages`, and job options."""


def read_body(endpoint: Endpoint, body: Mapping[str, Any]) -> GenerationBody:
    """Return what the body of a request asks for. Fields that llamaq does not know are ignored.

    Args:
        endpoint: The endpoint that the body is for.
        body: The decoded JSON object.

    Raises:
        InvalidRequest: The body has no prompt, or a field that is not supported. The message names the field.
    """
    for name, harmless in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name}: llamaq does not support it; leave it out")
    values = _read_prompt(endpoint, body)
    known = (JobRequest.model_fields.keys() | SYNONYMS.keys()) - RESERVED
    values |= {name: value for name, value in body.items() if name in known and value is not None}
    values |= _read_response_format(body.get("response_format"))
    model = body.get("model")
    return GenerationBody(endpoint, model if isinstance(model, str) else None, values)


def _read_prompt(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt, as an argument of `submit`."""
    if endpoint is Endpoint.CHAT:
        if "messages" not in body:
            raise InvalidRequest(f"messages: {endpoint} needs a list of messages")
        return {"messages": body["messages"]}
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return {"tokens": prompt}
    raise InvalidRequest("prompt: one prompt is required, a text or a list of token ids")


def _read_response_format(value: Any) -> dict[str, Any]:
    """Return the job option that a `response_format` means."""
    match value:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return {"json_schema": dict(schema)}
    raise InvalidRequest("response_format: the type must be text, json_object, or json_schema with a schema")
