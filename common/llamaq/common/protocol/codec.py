"""Encodes messages as msgpack and decodes them. No other module of llamaq uses msgpack, and nothing is unpickled.

The size of all data from Redis is checked before the data are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgpack
from pydantic import BaseModel, ValidationError

from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.protocol.job_events import EVENT, Event
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.job_request import JobRequest
from llamaq.common.protocol.slot_commands import SlotCommand, SlotReply
from llamaq.common.protocol.snapshots import Worker

M = TypeVar("M", bound=BaseModel)

# Limit of an event or an output. Only workers write them, so the limit only protects against corrupt data.
MAX_EVENT_BYTES = 64 * 1024 * 1024


def _pack(value: object) -> bytes:
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def _unpack(data: bytes, limit: int) -> Any:
    """Return the plain values in msgpack bytes. Raises `ProtocolError`."""
    if len(data) > limit:
        raise ProtocolError(f"{len(data)} bytes are more than the allowed {limit}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise ProtocolError(f"not msgpack: {exc or type(exc).__name__}") from exc


def encode_values(values: Sequence[int | str | bytes]) -> bytes:
    """Return a flat list as one argument of a script. Bytes become strings: msgpack in Redis has no binary type."""
    return cast(bytes, msgpack.packb(values, use_bin_type=False))


def explain(exc: ValidationError) -> str:
    """Return a validation error as one line that names each field, without the input, which may be private."""
    problems = []
    for error in exc.errors(include_input=False, include_url=False, include_context=False):
        place = ".".join(str(part) for part in error["loc"])
        message = error["msg"].removeprefix("Value error, ")
        problems.append(f"{place}: {message}" if place else message)
    return "; ".join(problems[:8])


def build_request(values: dict[str, Any]) -> JobRequest:
    """Return a validated request. Raises `InvalidRequest`, which names the invalid fields."""
    try:
        return JobRequest.model_validate(values)
    except ValidationError as exc:
        raise InvalidRequest(explain(exc)) from exc
    except RecursionError as exc:
        raise InvalidRequest("a parameter is nested too deeply") from exc


def encode_request(request: JobRequest, max_bytes: int) -> bytes:
    """Return an encoded request. Raises `InvalidRequest` if it is larger than `max_bytes` or contains invalid text."""
    try:
        data = _pack(request.model_dump(mode="python", exclude_defaults=True))
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"a text of the request is not valid Unicode: {exc.reason}") from exc
    except (ValueError, OverflowError, TypeError) as exc:
        raise InvalidRequest(f"the request cannot be encoded: {exc}") from exc
    if len(data) > max_bytes:
        raise InvalidRequest(f"the request has {len(data)} bytes, more than max_request_bytes={max_bytes}")
    return data


def decode_request(data: bytes, max_bytes: int) -> JobRequest:
    """Return the request in these bytes. Raises `InvalidRequest` if they are too large or not a request."""
    try:
        values = _unpack(data, max_bytes)
    except ProtocolError as exc:
        raise InvalidRequest(f"the request cannot be decoded: {exc}") from exc
    if not isinstance(values, dict):
        raise InvalidRequest("the request is not a map of parameters")
    return build_request(values)


def encode_event(event: Event) -> bytes:
    """Return an encoded event."""
    return _pack(event.model_dump())


def encode_tokens(offset: int, tokens: Sequence[int], text_offset: int, text: str) -> bytes:
    """Return an encoded `tokens` event. No model is built, because a worker encodes one for each job and tick."""
    return _pack({"type": "tokens", "offset": offset, "tokens": tokens, "text_offset": text_offset, "text": text})


def decode_event(data: bytes) -> Event:
    """Return the event in these bytes. Raises `ProtocolError`."""
    try:
        return EVENT.validate_python(_unpack(data, MAX_EVENT_BYTES))
    except ValidationError as exc:
        raise ProtocolError(f"not an event: {explain(exc)}") from exc


def encode_output(text: str, tokens: Sequence[int]) -> bytes:
    """Return the encoded output of a job, as it is stored in the hash of the job."""
    return _pack({"text": text, "tokens": tokens})


def decode_output(data: bytes) -> tuple[str, tuple[int, ...]]:
    """Return text and tokens from the encoded output of a job. Raises `ProtocolError`."""
    values = _unpack(data, MAX_EVENT_BYTES)
    try:
        return str(values["text"]), tuple(int(token) for token in values["tokens"])
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError("not a job's output") from exc


def encode_model(model: JobStats | Worker | SlotCommand | SlotReply) -> bytes:
    """Return an encoded model."""
    return _pack(model.model_dump(mode="json"))


def decode_model(kind: type[M], data: bytes, max_bytes: int = MAX_EVENT_BYTES) -> M:
    """Return the model of this class in these bytes. Raises `ProtocolError`."""
    try:
        return kind.model_validate(_unpack(data, max_bytes))
    except ValidationError as exc:
        raise ProtocolError(f"not a {kind.__name__}: {explain(exc)}") from exc
