"""The events of jobs. A `tokens` event is encoded and decoded without a pydantic model, because there are many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from llamaq.common.errors import ProtocolError
from llamaq.common.protocol.codec.models import explain
from llamaq.common.protocol.codec.outputs import (
    read_draws,
    read_logprobs,
    read_prompt_logprobs,
    read_tag_offsets,
)
from llamaq.common.protocol.codec.packing import MAX_EVENT_BYTES, pack, unpack
from llamaq.common.protocol.job_events import EVENT, Event, PromptProgress, TokenSpan
from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.common.protocol.sampling import MAX_TOKEN_ID


def encode_event(event: Event) -> bytes:
    """Return an encoded event."""
    return pack(event.model_dump())


def encode_tokens(
    offset: int,
    tokens: Sequence[int],
    text_offset: int,
    text: str,
    logprobs: Sequence[TokenLogprobs] = (),
    draws: Sequence[float] = (),
    tag_offsets: Sequence[int] = (),
    prompt_logprobs: PromptLogprobs | None = None,
) -> bytes:
    """Return an encoded `tokens` event. A worker encodes one for each job in each tick."""
    values: dict[str, Any] = {"type": "tokens", "offset": offset, "tokens": tokens}
    values |= {"text_offset": text_offset, "text": text}
    if logprobs:
        values["logprobs"] = logprobs
    if draws:
        values["draws"] = draws
    if tag_offsets:
        values["tag_offsets"] = tag_offsets
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = prompt_logprobs.packed()
    return pack(values)


def decode_event(data: bytes) -> Event:
    """Return the event in these bytes. Raises `ProtocolError`."""
    return _validate_event(unpack(data, MAX_EVENT_BYTES))


def _validate_event(values: object) -> Event:
    try:
        return EVENT.validate_python(values)
    except ValidationError as exc:
        raise ProtocolError(f"not an event: {explain(exc)}") from exc


def decode_streamed(data: bytes) -> Event | TokenSpan:
    """Return the event in these bytes, as `decode_event` does, but return a `tokens` event as a tuple.

    Raises:
        ProtocolError: The bytes are not an event.
    """
    values = unpack(data, MAX_EVENT_BYTES, use_list=False)
    if type(values) is dict and values.get("type") == "tokens":
        return _token_span(values)
    return _validate_event(values)


def _token_span(values: dict[Any, Any]) -> TokenSpan:
    """Return the content of a `tokens` event. The checks are those of the model `Tokens`."""
    offset, tokens, text_offset, text = map(values.get, ("offset", "tokens", "text_offset", "text"))
    if not (type(offset) is int and type(text_offset) is int and offset >= 0 and text_offset >= 0):
        raise ProtocolError("not an event: offset or text_offset is not a natural number")
    if not (type(text) is str and type(tokens) is tuple):
        raise ProtocolError("not an event: tokens is not a list, or text is not a string")
    for token in tokens:
        if not (type(token) is int and 0 <= token <= MAX_TOKEN_ID):
            raise ProtocolError("not an event: tokens contains a value that is not a token id")
    logprobs, draws = read_logprobs(values, len(tokens)), read_draws(values, len(tokens))
    tag_offsets = read_tag_offsets(values) if "tag_offsets" in values else ()
    prompt_logprobs = read_prompt_logprobs(values) if "prompt_logprobs" in values else None
    return TokenSpan(offset, tokens, text_offset, text, logprobs, draws, tag_offsets, prompt_logprobs)


_TOKENS_PREFIX = encode_tokens(0, (), 0, "")[:13]


def is_tokens_event(data: bytes) -> bool:
    """Return whether these bytes are certainly a `tokens` event, without decoding them. False: they may be any
    event.
    """
    return data.startswith(_TOKENS_PREFIX)


_PROGRESS_PREFIX = encode_event(PromptProgress(total_tokens=0, cached_tokens=0, processed_tokens=0, time_ms=0))[:22]


def is_prompt_progress(data: bytes) -> bool:
    """Return whether these bytes are certainly an event `prompt_progress`, without decoding them."""
    return data.startswith(_PROGRESS_PREFIX)
