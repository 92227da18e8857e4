"""Requests that fill a gap: `/infill` of llama-server, and `suffix` of OpenAI's completions.

A worker makes the prompt, because only it knows the model's tokens for gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.text_commands import TextAction
from llamaq.producer import AsyncClient
from llamaq.producer.queries import text_commands

GAP_FIELDS = ("input_prefix", "input_suffix", "input_extra")
"""The fields of `/infill` that its prompt is made of, in addition to `prompt`."""


async def with_gap_of_suffix(client: AsyncClient, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a completion. If it has a `suffix`, its prompt is the text before the gap.

    Raises:
        InvalidRequest: The body has a suffix and another prompt than one text, or its model does not fill gaps.
        LlamaqError: No worker of the queue has answered.
    """
    suffix = fields.get("suffix")
    if not suffix:
        return fields
    if not isinstance(suffix, str):
        raise InvalidRequest("suffix: a text is required")
    prompt = fields.get("prompt")
    if not isinstance(prompt, str):
        raise InvalidRequest("suffix: the prompt must be one text, which stands before the gap")
    if fields.get("echo"):
        raise InvalidRequest("echo: not supported together with suffix; leave it out")
    tokens = await _encode(client, fields.get("max_tokens"), prefix=prompt, suffix=suffix)
    return {**fields, "prompt": tokens, "suffix": None}


async def with_gap(client: AsyncClient, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request to `/infill` as one to `/completion`.

    Editors send a request with `n_predict` 0 to fill the cache before they need an answer. The prompt may take any time
    then.

    Raises:
        InvalidRequest: A field has a wrong form, or the model does not fill gaps.
        LlamaqError: No worker of the queue has answered.
    """
    for name in ("input_prefix", "input_suffix"):
        if not isinstance(fields.get(name), str):
            raise InvalidRequest(f"{name}: a text is required")
    begun = fields.get("prompt") or ""
    if not isinstance(begun, str):
        raise InvalidRequest("prompt: a text is required, the beginning of what belongs into the gap")
    body = {name: value for name, value in fields.items() if name not in GAP_FIELDS}
    if body.get("n_predict") == 0:
        body["t_max_predict_ms"] = None
    tokens = await _encode(
        client,
        body.get("n_predict", body.get("max_tokens")),
        prefix=fields["input_prefix"],
        suffix=fields["input_suffix"],
        begun=begun,
        snippets=_read_snippets(fields.get("input_extra")),
    )
    return {**body, "prompt": tokens}


def _read_snippets(value: Any) -> Sequence[dict[str, Any]]:
    """Return the snippets of `input_extra`: objects with a `text`, and perhaps the name of a file."""
    snippets = [] if value is None else value
    if not isinstance(snippets, list) or not all(
        isinstance(each, Mapping) and isinstance(each.get("text"), str) for each in snippets
    ):
        raise InvalidRequest("input_extra: a list of objects with `text` and `filename` is required")
    return [{name: each[name] for name in ("text", "filename") if name in each} for each in snippets]


async def _encode(client: AsyncClient, max_tokens: Any, **infill: Any) -> list[int]:
    """Ask a worker for the prompt. Limits that are no valid numbers do not count: the submit refuses them."""
    is_limit = type(max_tokens) is int and max_tokens > 0
    reply = await text_commands.ask(
        client.connection,
        TextAction.INFILL,
        None,
        infill={**infill, "max_tokens": max_tokens if is_limit else None},
    )
    return list(reply.tokens)
