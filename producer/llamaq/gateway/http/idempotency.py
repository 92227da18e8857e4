"""Reads the header `Idempotency-Key`."""

from __future__ import annotations

import hashlib
import secrets

from starlette.requests import Request

from llamaq.gateway.http.errors import invalid

HEADER = "Idempotency-Key"
MAX_KEY_CHARS = 255


def idempotency_key(request: Request, *, is_kept: bool) -> str | None:
    """Return the key of the jobs of a request. None: they belong to this request alone.

    Args:
        request: The request.
        is_kept: Whether its jobs run to their end although the client is gone. Then they have a key of their own.

    Raises:
        RequestRefused: The header is too long.
    """
    given = request.headers.get(HEADER)
    if given is None:
        return f"kept-{secrets.token_hex(16)}" if is_kept else None
    if not 0 < len(given) <= MAX_KEY_CHARS:
        raise invalid(f"{HEADER}: 1 to {MAX_KEY_CHARS} characters are required", HEADER)
    # The path belongs to the key: the same key at two endpoints means two requests.
    return "http-" + hashlib.sha256(f"{request.url.path}\n{given}".encode()).hexdigest()
