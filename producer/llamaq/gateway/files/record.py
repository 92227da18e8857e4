"""What is stored about a file besides its content."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import Field

from llamaq.common.protocol.wire_model import WireModel
from llamaq.gateway.http.errors import RequestRefused, invalid, not_found

MIN_TTL_S, MAX_TTL_S = 3600, 30 * 24 * 3600
"""Bounds of `expires_after`, as OpenAI's API has them."""
UPLOAD_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"


class FileRecord(WireModel):
    """A file of an API key. During its upload, it counts as a file of the largest size that it may reach."""

    id: str = Field(description="The id.")
    filename: str = Field("", description="Name that the client gave the file. It is shown, and used for nothing else.")
    purpose: str = Field(UPLOAD_PURPOSE, description="`batch` or `batch_output`.")
    n_bytes: int = Field(description="Size of the content.")
    created_ms: int = Field(description="Time of the upload, in milliseconds since the epoch.")
    expires_s: int = Field(description="Time when the file is removed, in seconds since the epoch.")
    is_complete: bool = Field(False, description="Whether the upload has ended.")


def file_object(record: FileRecord) -> dict[str, Any]:
    """Return the object `file` of OpenAI's API."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.n_bytes,
        "created_at": record.created_ms // 1000,
        "expires_at": record.expires_s,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def read_expiry(value: Any, name: str, default_s: float) -> int:
    """Return after how many seconds a file expires.

    Args:
        value: `{"anchor": "created_at", "seconds": N}`. None: the default.
        name: Name of the field, for the error.
        default_s: The default.

    Raises:
        RequestRefused: The value has another form.
    """
    if value is None:
        return int(default_s)
    seconds = value.get("seconds") if isinstance(value, Mapping) else None
    if isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 10:  # the values of an HTML form are texts
        seconds = int(seconds)
    is_anchored = isinstance(value, Mapping) and value.get("anchor") == "created_at"
    if not is_anchored or type(seconds) is not int or not MIN_TTL_S <= seconds <= MAX_TTL_S:
        raise invalid(f"{name}: an anchor 'created_at' and seconds from {MIN_TTL_S} to {MAX_TTL_S} are required", name)
    return seconds


def missing_file(file_id: str, param: str | None = None) -> RequestRefused:
    """Return the error for an unknown file."""
    message = f"there is no file {file_id[:100]!r}: the id is wrong, or it has expired or was deleted"
    if param is not None:
        return RequestRefused(HTTPStatus.BAD_REQUEST, f"{param}: {message}", code="file_not_found", param=param)
    return not_found(message)


def too_large_file(max_bytes: int) -> RequestRefused:
    """Return the error for a file that is too large."""
    return RequestRefused(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"file: it has more than {max_bytes} bytes (--max-file-bytes)",
        code="file_too_large",
        param="file",
        headers={"Connection": "close"},
    )
