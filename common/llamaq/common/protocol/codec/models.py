"""Pydantic models: validated, and stored as a whole. Errors name the invalid fields, and never show the values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from llamaq.common.errors import InvalidRequest, ProtocolError
from llamaq.common.protocol.codec.packing import MAX_EVENT_BYTES, pack, unpack
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.queue_and_worker_state import RecentJob, Worker
from llamaq.common.protocol.slot_commands import SlotCommand, SlotReply
from llamaq.common.protocol.text_commands import TextCommand, TextReply

M = TypeVar("M", bound=BaseModel)

MAX_PLACE_CHARS = 80
"""Longest name of a field in an error. The path to a value within nested values would be longer than the rest."""


def build_model(model: type[M], values: Mapping[str, Any]) -> M:
    """Return a validated model. Raises `InvalidRequest`, which names the invalid fields."""
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        raise InvalidRequest(explain(exc)) from exc


def explain(exc: ValidationError) -> str:
    """Return a validation error as one line that names each field, without the input, which may be private."""
    problems = []
    errors = exc.errors(include_input=False, include_url=False, include_context=False)
    for error in errors:
        if error["type"] == "too_short" and any(_is_within(other["loc"], error["loc"]) for other in errors):
            continue  # it counts the valid items alone
        place = shorten(".".join(str(part) for part in error["loc"]))
        message = error["msg"].removeprefix("Value error, ")
        problems.append(f"{place}: {message}" if place else message)
    return "; ".join(problems[:8])


def _is_within(place: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    """Return whether an error is about a part of the value at `outer`."""
    return len(place) > len(outer) and place[: len(outer)] == outer


def shorten(place: str) -> str:
    """Return the name of a field, or the beginning of a long name."""
    return place if len(place) <= MAX_PLACE_CHARS else f"{place[:MAX_PLACE_CHARS]}..."


def encode_model(model: JobStats | RecentJob | Worker | SlotCommand | SlotReply | TextCommand | TextReply) -> bytes:
    """Return an encoded model. Fields that are None are omitted."""
    return pack(model.model_dump(mode="json", exclude_none=True))


def decode_model(kind: type[M], data: bytes, max_bytes: int = MAX_EVENT_BYTES) -> M:
    """Return the model of this class in these bytes. Raises `ProtocolError`."""
    try:
        return kind.model_validate(unpack(data, max_bytes))
    except ValidationError as exc:
        raise ProtocolError(f"not a {kind.__name__}: {explain(exc)}") from exc


def decode_json(kind: type[M], text: bytes | None) -> M | None:
    """Return the model of this class in a JSON text. None: there is no text, or another client has damaged it."""
    try:
        return None if text is None else kind.model_validate_json(text)
    except ValidationError:
        return None
