"""Reads the body of a request for a new batch."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from llamaq.gateway.batches.record import BatchEndpoint, BatchRequest
from llamaq.gateway.files.record import read_expiry
from llamaq.gateway.http.errors import invalid
from llamaq.gateway.keys.key_record import KeyRecord
from llamaq.gateway.settings import ServeSettings

MAX_WINDOW_S = 30 * 24 * 3600
MAX_METADATA = 16
MAX_NAME_CHARS, MAX_VALUE_CHARS = 64, 512
OF_BODY = ("endpoint", "input_file_id", "completion_window", "metadata", "output_ttl_s")
"""Fields of a request that its body decides."""
_UNITS_S = {"m": 60, "h": 3600, "d": 24 * 3600}


def read_batch_request(
    body: Mapping[str, Any],
    settings: ServeSettings,
    key: KeyRecord | None,
    *,
    is_revocable: bool,
    idempotency_key: str | None = None,
) -> BatchRequest:
    """Return the batch that a body asks for.

    Args:
        body: The decoded JSON object.
        settings: The settings of this server. Settings that change an answer are stored in the batch, because all
            servers must compute a line in the same way.
        key: The API key of the request. None: the server requires none.
        is_revocable: Whether the key is in Redis.
        idempotency_key: What a repeated request has too, in hexadecimal digits after a prefix. It determines the id.
            None: the id is random.

    Raises:
        RequestRefused: A field is missing or not valid.
    """
    file_id, window = body.get("input_file_id"), body.get("completion_window", "24h")
    if not isinstance(file_id, str) or not file_id:
        raise invalid("input_file_id: the id of an uploaded file is required", "input_file_id")
    try:
        endpoint = BatchEndpoint(str(body.get("endpoint")))
    except ValueError as exc:
        raise invalid(f"endpoint: one of {', '.join(BatchEndpoint)} is required", "endpoint") from exc
    created_ms = time.time_ns() // 1_000_000
    return BatchRequest(
        id=f"batch_{secrets.token_hex(16) if idempotency_key is None else idempotency_key[-32:]}",
        key=key,
        is_revocable=is_revocable,
        queue=settings.queue,
        endpoint=endpoint,
        input_file_id=file_id,
        completion_window=window,
        created_ms=created_ms,
        expires_s=created_ms // 1000 + _seconds_of(window),
        output_ttl_s=read_expiry(body.get("output_expires_after"), "output_expires_after", settings.file_ttl_s),
        max_tokens=settings.default_max_tokens,
        metadata=_read_metadata(body.get("metadata")),
    )


def asks_for_the_same(request: BatchRequest, other: BatchRequest) -> bool:
    """Return whether two requests have the same body."""
    return all(getattr(request, name) == getattr(other, name) for name in OF_BODY)


def _seconds_of(window: Any) -> int:
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", window) if isinstance(window, str) else None
    seconds = 0 if found is None else int(found[1]) * _UNITS_S[found[2]]
    if not 0 < seconds <= MAX_WINDOW_S:
        raise invalid("completion_window: a duration such as '24h' is required, at most '30d'", "completion_window")
    return seconds


def _read_metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    is_valid = (
        isinstance(value, Mapping)
        and len(value) <= MAX_METADATA
        and all(isinstance(each, str) and len(each) <= MAX_VALUE_CHARS for each in value.values())
        and all(len(name) <= MAX_NAME_CHARS for name in value)
    )
    if not is_valid:
        raise invalid(
            f"metadata: an object with at most {MAX_METADATA} texts of {MAX_VALUE_CHARS} characters is required",
            "metadata",
        )
    return dict(value)
